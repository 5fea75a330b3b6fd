"""Methods of a module's class, looked up at each call.

An extension may patch a class, or give a module another class, at any time. A bound method would
keep running what was there before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from onediff_ext.engine.torch_versions import is_dynamo_tracing


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


class ClassMethod:
    """Calls the method that a module's class has at the moment of the call.

    Another extension that keeps the callable which stands in the method's place keeps, in a model
    without OneDiff, a bound method: the function of that moment. `keep_if_taken` does the same.

    Args:
        module: A model, or one of its blocks or layers.
        name: The method's name.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._kept: Callable[..., Any] | None = None
        # Dynamo cannot look methods up on some of diffusers' classes.
        self._shown = class_method(module, name)

    def show(self) -> None:
        """Show Dynamo the method that the class has now, in place of the one before."""
        self._shown = class_method(self._module, self._name)

    @property
    def bound(self) -> Callable[..., Any]:
        """The method as it is now, or as it was at `keep_if_taken`, bound to the module."""
        return class_method(self._module, self._name) if self._kept is None else self._kept

    @property
    def is_outdated(self) -> bool:
        """Whether the class has another method now than at `keep_if_taken`."""
        return self._kept is not None and self._kept != class_method(self._module, self._name)

    def keep_if_taken(self, ours: object) -> None:
        """Keep the method as soon as another extension stands around ours.

        Args:
            ours: What stands in the method's place for OneDiff.
        """
        if self._kept is not None:
            return
        outermost = vars(self._module).get(self._name)
        if outermost is ours or type(outermost).__module__.startswith("onediff_ext."):
            return
        self._kept = class_method(self._module, self._name)

    def follow(self) -> None:
        """Follow the class again, since nothing stands in the method's place any more."""
        self._kept = None
        self.show()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_tracing():
            return (self._shown if self._kept is None else self._kept)(*args, **kwargs)
        return self.bound(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassMethod) and self.bound == other.bound

    def __hash__(self) -> int:
        return id(self._module)


class ClassForward(ClassMethod):
    """Calls the forward that a module's class has at the moment of the call; see `ClassMethod`.

    Args:
        module: A model, or one of its blocks or layers.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, "forward")


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
