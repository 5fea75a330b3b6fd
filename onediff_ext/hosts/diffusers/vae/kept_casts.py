"""Casts of a VAE to float32 and back, done once for a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.patches import Patches


@dataclass(frozen=True)
class _Twins:
    """The same numbers in two types, as long as nobody has changed either in place."""

    narrow: torch.Tensor
    wide: torch.Tensor
    version: int


class KeptCasts:
    """Keeps what a model's weights are in a wider type, for the next time.

    SDXL's pipelines have a float16 VAE cast to float32 for encoding, back, and the same again for
    decoding (``force_upcast``): four times for each picture all of its modules are gone through
    and all of its weights are written anew.

    Args:
        model: Its weights are in two types within the block, which takes half as much memory again
            as the wider ones alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._twins: dict[nn.Parameter, _Twins] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within this ``with`` block ``model.to(dtype)`` puts the tensors of an earlier cast back
        in, where they are what a cast would give."""
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
        now, version = parameter.data, parameter._version
        twins = self._twins.get(parameter)
        if twins is not None and twins.version == version:
            for here, there in ((twins.narrow, twins.wide), (twins.wide, twins.narrow)):
                if here.data_ptr() == now.data_ptr() and there.dtype == dtype:
                    parameter.data = there
                    return
        cast = now.to(dtype)
        parameter.data = cast
        # Only a wider type has all numbers of the other, so that the way back changes none.
        if cast.element_size() > now.element_size():
            self._twins[parameter] = _Twins(now, cast, parameter._version)
        else:
            self._twins.pop(parameter, None)


def _only_dtype(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """The type, where a call of `Module.to` asks for nothing else."""
    given = [*args, *kwargs.values()]
    if len(given) == 1 and set(kwargs) <= {"dtype"} and isinstance(given[0], torch.dtype):
        return given[0]
    return None
