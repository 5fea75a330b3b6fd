"""An extension that wraps attention layers and leaves its wrappers there when it is off."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn


class Settings:
    """The state of one wrapper: the layer's method and whether the extension is on."""

    forward: Any = None
    enabled = True
    scale = 1.5

    @property
    def computed(self) -> bool:
        return self.enabled

    def asked(self) -> bool:
        return self.enabled


def guarded(settings: Settings) -> Callable[..., Any]:
    """Passes calls through while it is off."""

    @wraps(settings.forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        """It has a docstring."""
        if not settings.enabled:
            return settings.forward(*args, **kwargs)
        return settings.forward(*args, **kwargs) * settings.scale

    return wrapper


def guarded_otherwise(settings: Settings) -> Callable[..., Any]:
    """The guard has more than one part."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if settings.enabled is False or settings.scale == 1:
            return settings.forward(*args, **kwargs)
        return settings.forward(*args, **kwargs) * settings.scale

    return wrapper


def asking(settings: Settings) -> Callable[..., Any]:
    """The guard calls something, which may do anything."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not settings.asked():
            return settings.forward(*args, **kwargs)
        return settings.forward(*args, **kwargs) * settings.scale

    return wrapper


def computing(settings: Settings) -> Callable[..., Any]:
    """The guard reads a property, which runs code."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not settings.computed:
            return settings.forward(*args, **kwargs)
        return settings.forward(*args, **kwargs) * settings.scale

    return wrapper


def changing(settings: Settings) -> Callable[..., Any]:
    """It changes the output while it is off."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not settings.enabled:
            return settings.forward(*args, **kwargs) + 0
        return settings.forward(*args, **kwargs)

    return wrapper


def counting(settings: Settings) -> Callable[..., Any]:
    """It does something before its guard."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        settings.scale += 1
        if not settings.enabled:
            return settings.forward(*args, **kwargs)
        return settings.forward(*args, **kwargs)

    return wrapper


def with_own_argument(settings: Settings) -> Callable[..., Any]:
    """It does not hand on all that it is given."""

    def wrapper(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not settings.enabled:
            return settings.forward(*args, **kwargs)
        return settings.forward(x, *args, **kwargs)

    return wrapper


def leave_on(
    module: nn.Module, kind: Callable[[Settings], Callable[..., Any]] = guarded
) -> Settings:
    """Wrap a module's forward for good, and return the wrapper's state."""
    settings = Settings()
    settings.forward = module.forward
    module.forward = kind(settings)
    return settings
