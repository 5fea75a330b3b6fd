"""Calls of the aten operator with plain arguments, for each entry of the operator table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _positive(*shape: int) -> torch.Tensor:
    return _noise(*shape).abs() + 0.1


def _call(*args: Any, **kwargs: Any) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda: (
        tuple(a() if callable(a) else a for a in args),
        {name: a() if callable(a) else a for name, a in kwargs.items()},
    )


def X() -> torch.Tensor:  # noqa: N802
    return _noise(2, 6, 5, 7)


def Y() -> torch.Tensor:  # noqa: N802
    return _noise(2, 6, 5, 7).flip(0)


def M() -> torch.Tensor:  # noqa: N802
    return _noise(3, 4, 5)


def N() -> torch.Tensor:  # noqa: N802
    return _noise(3, 5, 6)


def POSITIVE() -> torch.Tensor:  # noqa: N802
    return _positive(2, 3, 5)


SAME_RESULT = {
    "aten._softmax.default": [_call(X, -1, False)],
    "aten._to_copy.default": [_call(X, dtype=torch.float64), _call(X, dtype=torch.float32)],
    "aten._unsafe_view.default": [_call(X, [12, -1])],
    "aten.abs.default": [_call(X)],
    "aten.add.Scalar": [_call(X, 2)],
    "aten.add.Tensor": [
        _call(X, Y),
        _call(X, 1.5),
        _call(X, Y, alpha=2),
        _call(X, lambda: _noise(6, 1, 1)),
        _call(X, lambda: Y().double()),
    ],
    "aten.addmm.default": [
        _call(lambda: _noise(6), lambda: _noise(4, 5), lambda: _noise(5, 6)),
        _call(lambda: _noise(6), lambda: _noise(4, 5), lambda: _noise(5, 6), beta=0.5, alpha=2),
    ],
    "aten.alias.default": [_call(X)],
    "aten.baddbmm.default": [
        _call(lambda: _noise(3, 4, 6), M, N, beta=1, alpha=0.3),
        _call(lambda: torch.full((3, 4, 6), float("nan")), M, N, beta=0, alpha=0.3),
    ],
    "aten.bmm.default": [_call(M, N)],
    "aten.cat.default": [_call(lambda: [X(), Y()], 1), _call(lambda: [X(), Y()], -1)],
    "aten.chunk.default": [_call(X, 2, 1), _call(X, 3, -1)],
    "aten.clone.default": [_call(X)],
    "aten.concat.default": [_call(lambda: [X(), Y()], -2)],
    "aten.constant_pad_nd.default": [_call(X, [1, 2, 0, 1], 0.5)],
    "aten.contiguous.default": [_call(X)],
    "aten.conv2d.default": [
        _call(X, lambda: _noise(8, 6, 3, 3), lambda: _noise(8), [1, 1], [1, 1]),
        _call(X, lambda: _noise(8, 6, 1, 1)),
        _call(X, lambda: _noise(6, 2, 3, 3), None, [2], [1], [1], 3),
        _call(X, lambda: _noise(4, 6, 3, 3), None, [2, 1], [2, 2], [2, 2]),
    ],
    "aten.cos.default": [_call(X)],
    "aten.detach.default": [_call(X)],
    "aten.div.Scalar": [_call(X, 3)],
    "aten.div.Tensor": [_call(X, lambda: _positive(2, 6, 5, 7)), _call(X, 1.5)],
    "aten.dropout.default": [_call(X, 0.5, False), _call(X, 0.0, True)],
    "aten.einsum.default": [_call("b i d, b j d -> b i j", lambda: [M(), _noise(3, 7, 5)])],
    "aten.embedding.default": [_call(lambda: _noise(9, 4), lambda: torch.tensor([[1, 8], [0, 1]]))],
    "aten.exp.default": [_call(X)],
    "aten.expand.default": [_call(lambda: _noise(2, 1, 5), [2, 3, -1])],
    "aten.flatten.using_ints": [_call(X, 1), _call(X, 1, 2), _call(X, -2)],
    "aten.gelu.default": [_call(X), _call(X, approximate="tanh")],
    "aten.group_norm.default": [
        _call(X, 3, lambda: _noise(6), lambda: _noise(6), 1e-5),
        _call(X, 2),
        _call(lambda: _noise(2, 6, 9), 3, lambda: _noise(6), lambda: _noise(6), 1e-6),
    ],
    "aten.layer_norm.default": [
        _call(X, [7], lambda: _noise(7), lambda: _noise(7), 1e-5),
        _call(X, [7], lambda: _noise(7)),
        _call(X, [5, 7]),
    ],
    "aten.linear.default": [
        _call(X, lambda: _noise(4, 7), lambda: _noise(4)),
        _call(lambda: _noise(3, 7), lambda: _noise(4, 7)),
        _call(M, lambda: _noise(4, 5)),
    ],
    "aten.matmul.default": [_call(X, lambda: _noise(2, 6, 7, 3)), _call(M, lambda: _noise(5, 2))],
    "aten.mean.dim": [_call(X, [1], True), _call(X, [-1, -2]), _call(X, None)],
    "aten.mm.default": [_call(lambda: _noise(4, 5), lambda: _noise(5, 6))],
    "aten.mul.Scalar": [_call(X, 3)],
    "aten.mul.Tensor": [_call(X, Y), _call(X, 0.5), _call(X, lambda: _noise(6, 1, 1))],
    "aten.neg.default": [_call(X)],
    "aten.pad.default": [_call(X, [0, 1, 0, 1]), _call(X, [1, 1, 1, 1], "constant", 2.0)],
    "aten.permute.default": [_call(X, [0, 2, 3, 1]), _call(X, [0, -1, 1, 2])],
    "aten.pow.Tensor_Scalar": [_call(POSITIVE, 2), _call(POSITIVE, 0.5)],
    "aten.relu.default": [_call(X)],
    "aten.reshape.default": [_call(X, [2, -1])],
    "aten.rsqrt.default": [_call(POSITIVE)],
    "aten.rsub.Scalar": [_call(X, 2), _call(X, 2, 3)],
    "aten.scaled_dot_product_attention.default": [
        _call(lambda: _noise(2, 3, 9, 4), lambda: _noise(2, 3, 5, 4), lambda: _noise(2, 3, 5, 6)),
        _call(
            lambda: _noise(2, 3, 9, 4),
            lambda: _noise(2, 3, 5, 4),
            lambda: _noise(2, 3, 5, 4),
            lambda: _noise(9, 5),
            scale=0.3,
        ),
        _call(lambda: _noise(2, 9, 4), lambda: _noise(2, 5, 4), lambda: _noise(2, 5, 4)),
    ],
    "aten.select.int": [_call(X, 1, -1), _call(X, -1, 2)],
    "aten.sigmoid.default": [_call(X)],
    "aten.silu.default": [_call(X)],
    "aten.sin.default": [_call(X)],
    "aten.slice.Tensor": [
        _call(X, 1, 2, 5),
        _call(X, -1, 1, 9223372036854775807, 2),
        _call(X, 2, -3, -1),
        _call(X, 1, 0, 9223372036854775807),
    ],
    "aten.softmax.int": [_call(X, -1), _call(X, 1, torch.float64)],
    "aten.split.Tensor": [_call(X, 4, 1), _call(X, 7, -1)],
    "aten.split_with_sizes.default": [_call(X, [1, 2, 3], 1)],
    "aten.sqrt.default": [_call(POSITIVE)],
    "aten.squeeze.dim": [_call(lambda: _noise(2, 1, 3), 1), _call(X, 1)],
    "aten.squeeze.dims": [_call(lambda: _noise(2, 1, 3, 1), [1, -1])],
    "aten.stack.default": [_call(lambda: [X(), Y()]), _call(lambda: [X(), Y()], -1)],
    "aten.sub.Scalar": [_call(X, 3)],
    "aten.sub.Tensor": [_call(X, Y), _call(X, Y, alpha=2)],
    "aten.sum.dim_IntList": [_call(X, [2], True), _call(X, [-1, 1])],
    "aten.sym_size.int": [_call(X, 2), _call(X, -1)],
    "aten.tanh.default": [_call(X)],
    "aten.to.dtype": [_call(X, torch.float64), _call(X, torch.float32)],
    "aten.transpose.int": [_call(X, 1, 2), _call(X, -1, -3)],
    "aten.unbind.int": [_call(X, 1), _call(X, -2)],
    "aten.unsqueeze.default": [_call(X, 0), _call(X, -1)],
    "aten.upsample_bilinear2d.vec": [
        _call(X, [10, 14], False, None),
        _call(X, [9, 8], True, None),
    ],
    "aten.upsample_nearest2d.vec": [_call(X, None, [2.0, 2.0]), _call(X, [9, 13], None)],
    "aten.var.correction": [
        _call(X, [1], correction=0, keepdim=True),
        _call(X, [-1, -2], correction=1),
    ],
    "aten.view.default": [_call(X, [2, 3, -1])],
    "aten.where.self": [_call(lambda: _noise(2, 6, 5, 7) > 0, X, Y)],
}
"""Operator → calls whose result OneFlow must match."""

NO_RESULT = ("aten._assert_scalar.default", "aten._assert_tensor_metadata.default",
             "aten.sym_constrain_range_for_size.default")  # fmt: skip
"""Checks that export leaves in a program; they do nothing."""

REFUSED = {
    "aten.dropout.default": _call(X, 0.5, True),
    "aten.var.correction": _call(X, [1], correction=2),
    "aten._to_copy.default": _call(X, pin_memory=True),
    "aten.scaled_dot_product_attention.default": _call(
        lambda: _noise(1, 1, 4, 4), lambda: _noise(1, 1, 4, 4), lambda: _noise(1, 1, 4, 4),
        is_causal=True,
    ),
}  # fmt: skip
"""Operator → a call that OneFlow does not support."""
