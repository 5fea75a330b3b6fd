"""Autocast's rules for CUDA as plain casts, for tracing a block where there is no CUDA.

Autocast's rules belong to a kind of device: on a CPU, LayerNorm stays in 16 bits and a product
of float32 tensors may not. A forked child cannot touch the GPU, so it traces on the CPU, and
under autocast for a GPU it writes down the casts that the GPU's rules would make.

Source: torch's ATen/autocast_mode.h (2.8 to 2.13), of which only what blocks call is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from onediff_ext.core.errors import ExportError

# Functions of torch by their names, as modules and tensors call them.
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
# Which take the type of their result as an argument, if none is given.
FLOAT32_RESULT = frozenset({"softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"})
# Autocast leaves these alone.
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
    """While a block is traced: what ``torch.autocast("cuda", dtype)`` would do.

    Args:
        dtype: What products are computed in, ``torch.float16`` or ``torch.bfloat16``.

    Raises:
        ExportError: In the block, when it calls a function whose rule is not known here.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in LOWER_PRECISION:
            args, kwargs = _cast((args, kwargs), self._dtype)
        elif name in FLOAT32 or (name in FLOAT32_RESULT and kwargs.get("dtype") is None):
            args, kwargs = _cast((args, kwargs), torch.float32)
        elif name not in AS_THEY_ARE and name not in FLOAT32_RESULT:
            raise ExportError(f"Autocast's rule for {name} is not known outside of CUDA.")
        return func(*args, **kwargs)


def _cast(given: Any, dtype: torch.dtype) -> Any:
    """Tensors of floating point, but for float64, as this type."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible else tensor

    return pytree.tree_map_only(torch.Tensor, cast, given)
