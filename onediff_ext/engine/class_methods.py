"""Methods of a module's class, looked up at each call.

An extension may patch a class, or give a module another class, at any time. A bound method would
keep running what was there before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def class_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return a method of a module's class as it is now, bound, whatever the module itself has.

    Args:
        module: The module.
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
        module: The module.
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

    Returns:
        The module's own attribute, or else a `ClassForward`.
    """
    own: Callable[..., Any] | None = vars(module).get("forward")
    return ClassForward(module) if own is None else own
