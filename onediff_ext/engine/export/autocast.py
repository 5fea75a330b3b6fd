"""Autocast's rules for CUDA as explicit casts, to trace a block on any device.

Autocast has rules for each device type: on a CPU, LayerNorm stays in 16 bits and some products
stay in float32. A forked child cannot use the GPU: it traces on the CPU. A graph that calls
autocast itself cannot be saved. So tracing inserts the casts that autocast would make on the GPU.

Source: torch's ATen/autocast_mode.h (2.8 to 2.13), limited to the functions that blocks call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from onediff_ext.core.errors import ExportError
from onediff_ext.engine.torch_versions import autocast_dtype, set_cuda_autocast

# Names of torch's functions, as modules and tensors call them.
LOWER_PRECISION = frozenset(
    {
        "conv2d",
        "linear",
        "matmul",
        "__matmul__",
        "bmm",
        "baddbmm",
        "addmm",
        "mm",
        "einsum",
        "scaled_dot_product_attention",
    }
)
FLOAT32 = frozenset(
    {"layer_norm", "group_norm", "exp", "log", "pow", "__pow__", "reciprocal", "rsqrt"}
)
# These get float32 only when the caller passes no dtype for the result.
FLOAT32_RESULT = frozenset({"softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"})
# Autocast does not change these.
AS_THEY_ARE = frozenset(
    {
        *("__get__", "__getitem__", "__set__", "dim", "size", "stride", "numel", "is_contiguous"),
        *("is_floating_point", "requires_grad_", "detach", "clone", "contiguous", "to", "type"),
        *("float", "half", "bfloat16", "view", "reshape", "permute", "transpose", "flatten"),
        *("unflatten", "unsqueeze", "squeeze", "expand", "repeat", "chunk", "split", "cat"),
        *("stack", "unbind", "movedim", "swapaxes", "t", "add", "__add__", "__radd__", "__iadd__"),
        *("add_", "sub", "__sub__", "__rsub__", "mul", "__mul__", "__rmul__", "__imul__", "mul_"),
        *("div", "__truediv__", "__itruediv__", "div_", "silu", "gelu", "relu", "sigmoid"),
        *("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like"),
        *("dropout", "abs", "amax", "amin", "mean", "clamp", "clamp_min", "round"),
        *("_scaled_mm", "_int_mm"),
    }
)


class CudaAutocast(TorchFunctionMode):
    """Does what ``torch.autocast("cuda", dtype)`` would do, while a block is traced.

    Code under ``torch.autocast("cuda", enabled=False)`` is left as it is.

    Args:
        dtype: The dtype of products, ``torch.float16`` or ``torch.bfloat16``.

    Raises:
        ExportError: Inside the block, when it calls a function whose rule is unknown here.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._outer: tuple[bool, torch.dtype] | None = None

    def __enter__(self) -> CudaAutocast:
        # `torch.autocast` would be recorded as a call of another graph; these settings are not.
        self._outer = set_cuda_autocast(True, self._dtype)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        assert self._outer is not None
        set_cuda_autocast(*self._outer)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if autocast_dtype("cuda") is None:
            return func(*args, **kwargs)
        if name in LOWER_PRECISION:
            args, kwargs = _cast((args, kwargs), self._dtype)
        elif name in FLOAT32 or (name in FLOAT32_RESULT and kwargs.get("dtype") is None):
            args, kwargs = _cast((args, kwargs), torch.float32)
        elif name not in AS_THEY_ARE and name not in FLOAT32_RESULT:
            raise ExportError(f"Autocast's rule for {name} is not known outside of CUDA.")
        return func(*args, **kwargs)


def _cast(given: Any, dtype: torch.dtype) -> Any:
    """Cast tensors of floating point, except float64, to this dtype."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible else tensor

    return pytree.tree_map_only(torch.Tensor, cast, given)
