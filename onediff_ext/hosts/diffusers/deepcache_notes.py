"""What tells a UNet's DeepCache of changes that its calls do not show."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from onediff_ext.engine.deepcache.deepcache_forward import DeepCache
from onediff_ext.engine.stand_in import StandIn
from onediff_ext.engine.torch_versions import is_dynamo_tracing


class Invalidating(StandIn):
    """A method of the UNet that changes its weights."""

    def __init__(self, method: Callable[..., Any], cache: DeepCache) -> None:
        self._method, self._cache = method, cache

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self._method, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._cache.invalidate()
        try:
            return self._method(*args, **kwargs)
        finally:
            self._cache.invalidate()


class NoteControl:
    """A pre-hook that notes whether a ControlNet is in its range of steps.

    Outside of it diffusers calls the ControlNet with a scale of 0.
    """

    def __init__(self, name: str, cache: DeepCache) -> None:
        self._name, self._cache = name, cache

    def __call__(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        if is_dynamo_tracing():
            return
        self._cache.note(self._name, bool(kwargs.get("conditioning_scale", 1.0)))
