"""Cached casts of a VAE to float32 and back, computed once for each job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.patches import Patches
from onediff_ext.engine.validity.tensor_contents import version_of


@dataclass(frozen=True)
class _Twins:
    """The same values in two types, valid while neither tensor is changed in place."""

    narrow: torch.Tensor
    wide: torch.Tensor
    version: int


class KeptCasts:
    """Keeps a model's weights in a wider type for the next cast.

    SDXL's pipelines cast a float16 VAE to float32 for encoding and back, and again for decoding
    (``force_upcast``). So for each picture all its modules are visited and all its weights are
    written four times.

    Args:
        model: Its weights exist in two types within the block, which takes 1.5 times the memory
            of the wider type alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._twins: dict[nn.Parameter, _Twins] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let ``model.to(dtype)`` reuse the tensors of an earlier cast within this ``with`` block.

        They are reused only where they equal a new cast.
        """
        own = self._model.to

        def to(*args: Any, **kwargs: Any) -> Any:
            dtype = _only_dtype(args, kwargs)
            if dtype is None or next(self._model.buffers(), None) is not None:
                return own(*args, **kwargs)
            for parameter in self._model.parameters():
                if parameter.is_floating_point() and parameter.dtype != dtype:
                    self._cast(parameter, dtype)
            return self._model

        try:
            with Patches() as patches:
                patches.set(self._model, "to", to)
                yield
        finally:
            self._twins.clear()

    def _cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        now, version = parameter.data, version_of(parameter)
        if version < 0:
            parameter.data = now.to(dtype)  # a write to it would not be seen
            return
        twins = self._twins.get(parameter)
        if twins is not None and twins.version == version:
            for here, there in ((twins.narrow, twins.wide), (twins.wide, twins.narrow)):
                if here.data_ptr() == now.data_ptr() and there.dtype == dtype:
                    parameter.data = there
                    return
        cast = now.to(dtype)
        parameter.data = cast
        # Only a wider type represents all values of the other, so the way back is exact.
        if cast.element_size() > now.element_size():
            self._twins[parameter] = _Twins(now, cast, version_of(parameter))
        else:
            self._twins.pop(parameter, None)


def _only_dtype(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype if a call of `Module.to` asks for nothing else, else None."""
    given = [*args, *kwargs.values()]
    if len(given) == 1 and set(kwargs) <= {"dtype"} and isinstance(given[0], torch.dtype):
        return given[0]
    return None
