"""Methods of a module's class, looked up at each call.

An extension may patch a class, or give a module another class, at any time. A bound method would
keep running what was there before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def class_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return a method of a module's class as it is now, bound, whatever the module itself has.

    Args:
        module: A model, or one of its blocks or layers.
        name: The method's name.

    Raises:
        AttributeError: The class has no such method.
    """
    cls = type(module)
    for base in cls.__mro__:
        if name in base.__dict__:
            method = base.__dict__[name]
            bind = getattr(type(method), "__get__", None)
            found: Callable[..., Any] = method if bind is None else bind(method, module, cls)
            return found
    raise AttributeError(name)


class ClassForward:
    """Calls the forward that a module's class has at the moment of the call.

    Args:
        module: A model, or one of its blocks or layers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def bound(self) -> Callable[..., Any]:
        """The forward as it is now, bound to the module."""
        return class_method(self._module, "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.bound(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassForward) and self._module is other._module

    def __hash__(self) -> int:
        return id(self._module)


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return what runs as a module's forward.

    Args:
        module: A model, or one of its blocks or layers.

    Returns:
        The module's own attribute, or else a `ClassForward`.
    """
    own: Callable[..., Any] | None = vars(module).get("forward")
    return ClassForward(module) if own is None else own


def forward_slot(module: nn.Module) -> str:
    """Return the attribute in which a module's forward lies, under a hook of accelerate if any.

    accelerate's hooks bring a model's weights to the GPU (``enable_model_cpu_offload``) and run
    the forward that was there before from ``_old_forward``. What stands in place of that one is
    called with the weights where they belong, and the hook stays the outermost.

    Args:
        module: A model, or one of its blocks or layers.

    Returns:
        ``"forward"`` or ``"_old_forward"``.
    """
    own = vars(module).get("forward")
    if not isinstance(own, functools.partial) or "_old_forward" not in vars(module):
        return "forward"
    return "_old_forward" if own.func.__module__ == "accelerate.hooks" else "forward"


def inner_forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return what runs as a module's forward under a hook of accelerate, as `forward_of`.

    Args:
        module: A model, or one of its blocks or layers.
    """
    slot = forward_slot(module)
    if slot == "forward":
        return forward_of(module)
    own: Callable[..., Any] = vars(module)[slot]
    is_class_s = getattr(own, "__func__", None) is type(module).forward
    return ClassForward(module) if is_class_s else own
