"""The table of OneFlow's operators: aten operator → OneFlow function.

It imports without OneFlow. Each entry takes the `oneflow` module, then the arguments of the aten
operator with OneFlow tensors, and refuses arguments that it does not support.
tests/oneflow/operators.py has a case for each entry.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from onediff_ext.backends.oneflow import composed
from onediff_ext.core.errors import BackendError

Lowering = Callable[..., Any]


def _method(name: str) -> Lowering:
    def call(flow: Any, x: Any) -> Any:  # noqa: ARG001
        return getattr(x, name)()

    return call


def _same(flow: Any, x: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    _only(kwargs, "memory_format", "implicit")
    return x


def _nothing(flow: Any, *args: Any, **kwargs: Any) -> None:
    """Ignore a check that export left in the program; the engine has its own."""


def _dropout(flow: Any, x: Any, p: float, train: bool) -> Any:  # noqa: ARG001
    if train and p:
        raise BackendError("dropout that drops something has no OneFlow form")
    return x


def _add(flow: Any, x: Any, y: Any, *, alpha: float = 1) -> Any:  # noqa: ARG001
    return x + (y if alpha == 1 else y * alpha)


def _sub(flow: Any, x: Any, y: Any, *, alpha: float = 1) -> Any:  # noqa: ARG001
    return x - (y if alpha == 1 else y * alpha)


def _rsub(flow: Any, x: Any, y: Any, alpha: float = 1) -> Any:
    return _sub(flow, y, x, alpha=alpha)


def _mul(flow: Any, x: Any, y: Any) -> Any:  # noqa: ARG001
    return x * y


def _div(flow: Any, x: Any, y: Any) -> Any:  # noqa: ARG001
    return x / y


def _pow(flow: Any, x: Any, exponent: float) -> Any:
    return flow.pow(x, exponent)


def _gelu(flow: Any, x: Any, *, approximate: str = "none") -> Any:
    if approximate == "none":
        return flow._C.gelu(x)
    return flow._C.gelu_with_approximate(x, approximate)


def _softmax(flow: Any, x: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    return flow.softmax(_cast(flow, x, dtype), dim=dim)


def _raw_softmax(flow: Any, x: Any, dim: int, half_to_float: bool) -> Any:
    return flow.softmax(_cast(flow, x, torch.float32 if half_to_float else None), dim=dim)


def _reduction(name: str) -> Callable[..., Any]:
    """Return an operator that calls a tensor's method `name`, such as ``"mean"``."""

    def reduce(
        flow: Any,
        x: Any,
        dim: Sequence[int] | None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Any:
        return getattr(_cast(flow, x, dtype), name)(dim=_dims(x, dim), keepdim=keepdim)

    return reduce


def _var(
    flow: Any,  # noqa: ARG001
    x: Any,
    dim: Sequence[int] | None = None,
    *,
    correction: float = 1,
    keepdim: bool = False,
) -> Any:
    if correction not in (0, 1):
        raise BackendError(f"a variance with correction {correction} has no OneFlow form")
    return x.var(dim=_dims(x, dim), unbiased=correction == 1, keepdim=keepdim)


def _matmul(flow: Any, x: Any, y: Any) -> Any:
    return flow.matmul(x, y)


def _addmm(flow: Any, bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = flow.matmul(x, y)
    return (bias if beta == 1 else bias * beta) + (product if alpha == 1 else product * alpha)


def _baddbmm(flow: Any, bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if beta == 0:  # then the bias may be uninitialised memory
        return flow.matmul(x, y) * alpha
    return _addmm(flow, bias, x, y, beta=beta, alpha=alpha)


def _view(flow: Any, x: Any, shape: Sequence[int]) -> Any:  # noqa: ARG001
    return x.reshape(*shape)


def _transpose(flow: Any, x: Any, first: int, second: int) -> Any:
    return flow.transpose(x, first % x.ndim, second % x.ndim)


def _permute(flow: Any, x: Any, dims: Sequence[int]) -> Any:  # noqa: ARG001
    return x.permute(*(dim % x.ndim for dim in dims))


def _unsqueeze(flow: Any, x: Any, dim: int) -> Any:
    return flow.unsqueeze(x, dim % (x.ndim + 1))


def _squeeze(flow: Any, x: Any, dim: int | Sequence[int]) -> Any:  # noqa: ARG001
    gone = {d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)}
    return x.reshape(*(n for d, n in enumerate(x.shape) if d not in gone or n != 1))


def _expand(flow: Any, x: Any, sizes: Sequence[int], *, implicit: bool = False) -> Any:  # noqa: ARG001
    return x.expand(*sizes)


def _flatten(flow: Any, x: Any, start: int = 0, end: int = -1) -> Any:  # noqa: ARG001
    start, end = start % x.ndim, end % x.ndim
    inner = math.prod(x.shape[start : end + 1])
    return x.reshape(*x.shape[:start], inner, *x.shape[end + 1 :])


def _slice(
    flow: Any,  # noqa: ARG001
    x: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    dim %= x.ndim
    first, last, _ = slice(start, end).indices(x.shape[dim])
    if (first, last, step) == (0, x.shape[dim], 1):
        return x
    return x[tuple([slice(None)] * dim + [slice(first, last, step)])]


def _select(flow: Any, x: Any, dim: int, index: int) -> Any:  # noqa: ARG001
    dim %= x.ndim
    return x[tuple([slice(None)] * dim + [index % x.shape[dim]])]


def _cat(flow: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    return flow.cat(list(tensors), dim=dim % tensors[0].ndim)


def _stack(flow: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    return flow.stack(list(tensors), dim=dim % (tensors[0].ndim + 1))


def _split(flow: Any, x: Any, size: int, dim: int = 0) -> list[Any]:
    dim %= x.ndim
    starts = range(0, x.shape[dim], size)
    return [_slice(flow, x, dim, start, start + size) for start in starts]


def _split_sizes(flow: Any, x: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_slice(flow, x, dim, a, a + n) for a, n in zip(starts, sizes, strict=True)]


def _chunk(flow: Any, x: Any, chunks: int, dim: int = 0) -> list[Any]:
    return _split(flow, x, -(-x.shape[dim] // chunks), dim)


def _unbind(flow: Any, x: Any, dim: int = 0) -> list[Any]:
    return [_select(flow, x, dim, i) for i in range(x.shape[dim])]


def _where(flow: Any, condition: Any, x: Any, y: Any) -> Any:
    return flow.where(condition, x, y)


def _nearest(flow: Any, x: Any, size: Any, scales: Any = None) -> Any:
    return flow.nn.functional.interpolate(x, **_resize(size, scales), mode="nearest")


def _bilinear(flow: Any, x: Any, size: Any, align_corners: bool, scales: Any = None) -> Any:
    return flow.nn.functional.interpolate(
        x, **_resize(size, scales), mode="bilinear", align_corners=align_corners
    )


def _resize(size: Any, scales: Any) -> dict[str, Any]:
    if size is not None:
        return {"size": tuple(size)}
    return {"scale_factor": tuple(scales)}


def _pad(
    flow: Any, x: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Any:
    return flow.nn.functional.pad(x, list(pad), mode, value or 0.0)


def _constant_pad(flow: Any, x: Any, pad: Sequence[int], value: float = 0) -> Any:
    return _pad(flow, x, pad, "constant", value)


def _embedding(flow: Any, weight: Any, indices: Any, *unused: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    return flow._C.gather(weight, indices, axis=0)


def _einsum(flow: Any, equation: str, tensors: Sequence[Any], **kwargs: Any) -> Any:
    _only(kwargs, "path")
    return flow.einsum(equation, *tensors)


def _to_copy(flow: Any, x: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    _only(kwargs, "layout", "device", "non_blocking", "memory_format")  # engine: one device
    return _cast(flow, x, dtype)


def _to_dtype(flow: Any, x: Any, dtype: torch.dtype, *unused: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    return _cast(flow, x, dtype)


def _size(flow: Any, x: Any, dim: int) -> int:  # noqa: ARG001
    return int(x.shape[dim])


def _cast(flow: Any, x: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return x
    wanted = getattr(flow, str(dtype).removeprefix("torch."), None)
    if wanted is None:
        raise BackendError(f"OneFlow has no {dtype}")
    return x if x.dtype == wanted else x.to(wanted)


def _dims(x: Any, dims: Sequence[int] | None) -> list[int]:
    return list(range(x.ndim)) if not dims else [dim % x.ndim for dim in dims]


def _only(kwargs: Mapping[str, Any], *known: str) -> None:
    unknown = sorted(set(kwargs) - set(known))
    if unknown:
        raise BackendError(f"the argument {unknown[0]} has no OneFlow form")


TABLE: Mapping[str, Lowering] = {
    "aten._assert_scalar.default": _nothing,
    "aten._assert_tensor_metadata.default": _nothing,
    "aten._softmax.default": _raw_softmax,
    "aten._to_copy.default": _to_copy,
    "aten._unsafe_view.default": _view,
    "aten.abs.default": _method("abs"),
    "aten.add.Scalar": _add,
    "aten.add.Tensor": _add,
    "aten.addmm.default": _addmm,
    "aten.alias.default": _same,
    "aten.baddbmm.default": _baddbmm,
    "aten.bmm.default": _matmul,
    "aten.cat.default": _cat,
    "aten.chunk.default": _chunk,
    "aten.clone.default": _same,
    "aten.concat.default": _cat,
    "aten.constant_pad_nd.default": _constant_pad,
    "aten.contiguous.default": _same,
    "aten.conv2d.default": composed.conv2d,
    "aten.cos.default": _method("cos"),
    "aten.detach.default": _same,
    "aten.div.Scalar": _div,
    "aten.div.Tensor": _div,
    "aten.dropout.default": _dropout,
    "aten.einsum.default": _einsum,
    "aten.embedding.default": _embedding,
    "aten.exp.default": _method("exp"),
    "aten.expand.default": _expand,
    "aten.flatten.using_ints": _flatten,
    "aten.gelu.default": _gelu,
    "aten.group_norm.default": composed.group_norm,
    "aten.layer_norm.default": composed.layer_norm,
    "aten.linear.default": composed.linear,
    "aten.matmul.default": _matmul,
    "aten.mean.dim": _reduction("mean"),
    "aten.mm.default": _matmul,
    "aten.mul.Scalar": _mul,
    "aten.mul.Tensor": _mul,
    "aten.neg.default": _method("neg"),
    "aten.pad.default": _pad,
    "aten.permute.default": _permute,
    "aten.pow.Tensor_Scalar": _pow,
    "aten.relu.default": _method("relu"),
    "aten.reshape.default": _view,
    "aten.rsqrt.default": _method("rsqrt"),
    "aten.rsub.Scalar": _rsub,
    "aten.scaled_dot_product_attention.default": composed.attention,
    "aten.select.int": _select,
    "aten.sigmoid.default": _method("sigmoid"),
    "aten.silu.default": _method("silu"),
    "aten.sin.default": _method("sin"),
    "aten.slice.Tensor": _slice,
    "aten.softmax.int": _softmax,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split_sizes,
    "aten.sqrt.default": _method("sqrt"),
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.stack.default": _stack,
    "aten.sub.Scalar": _sub,
    "aten.sub.Tensor": _sub,
    "aten.sum.dim_IntList": _reduction("sum"),
    "aten.sym_constrain_range_for_size.default": _nothing,
    "aten.sym_size.int": _size,
    "aten.tanh.default": _method("tanh"),
    "aten.to.dtype": _to_dtype,
    "aten.transpose.int": _transpose,
    "aten.unbind.int": _unbind,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.upsample_bilinear2d.vec": _bilinear,
    "aten.upsample_nearest2d.vec": _nearest,
    "aten.var.correction": _var,
    "aten.view.default": _view,
    "aten.where.self": _where,
}

# Arithmetic on sizes, which are integers when a graph is made.
ARITHMETIC: frozenset[object] = frozenset(
    {
        operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv,
        operator.mod, operator.neg, operator.eq, operator.ne, operator.lt, operator.le,
        operator.gt, operator.ge, operator.getitem, math.ceil, math.floor, math.trunc,
        torch.sym_float, torch.sym_int, torch.sym_max, torch.sym_min,
    }
)  # fmt: skip
