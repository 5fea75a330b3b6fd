"""How large an error may be that is nothing but rounding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# Of a whole latent picture, norm(x - y) / norm(y): twice what graphs and eager were seen to differ
# by. On a CPU the graphs are run operator by operator; on a GPU they are Inductor's.
TOLERANCES = {
    ("cpu", torch.float32): 4e-5,
    ("cpu", torch.float64): 4e-5,
    ("cpu", torch.float16): 8e-3,
    ("cpu", torch.bfloat16): 2e-2,
    ("cuda", torch.float32): 4e-3,  # TF32
    ("cuda", torch.float16): 8e-3,
    ("cuda", torch.bfloat16): 2e-2,
}
# Larger errors may still be rounding where a sequence of operations makes more of it (a scale of
# 2.5 in an attention, an output that is the next input): so many times the twin's own distance from
# itself in float64, and up to a limit above which nothing is excused.
_EXCUSED = {torch.float32: (8, 1e-3), torch.float16: (4, 0.1), torch.bfloat16: (2, 0.7)}


class Excused(NamedTuple):
    """An error above the tolerance that passed as rounding."""

    error: float
    own: float
    dtype: torch.dtype


def allowed(dtype: torch.dtype, own: float) -> float:
    """The largest error that may be rounding where the twin's own is so large."""
    times, limit = _EXCUSED.get(dtype, (0, 0.0))
    return min(times * own, limit)


@contextmanager
def in_float64(models: Iterable[nn.Module]) -> Iterator[None]:
    """Within it, models compute in 64 bits; then each has the very weights that it had before."""
    kept, doubles = list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]](), {}
    for model in models:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None and tensor.is_floating_point():
                        kept.append((table, name, tensor))
    try:
        for table, name, tensor in kept:
            if tensor not in doubles:
                double = tensor.detach().double()
                if isinstance(tensor, nn.Parameter):
                    double = nn.Parameter(double, requires_grad=False)
                doubles[tensor] = double
            table[name] = doubles[tensor]
        yield
    finally:
        for table, name, tensor in kept:
            table[name] = tensor


class SameNoise(TorchFunctionMode):
    """Within it, noise of 64 bits is that of another dtype: a generator's depends on it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.randn and kwargs.get("dtype") is torch.float64:
            return func(*args, **{**kwargs, "dtype": self._dtype}).double()
        return func(*args, **kwargs)
