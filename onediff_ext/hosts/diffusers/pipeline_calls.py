"""Runs each call of some pipelines within a context.

``pipe(...)`` runs ``__call__`` of the pipeline's class: Python looks it up there, and not on the
object. So this method is replaced on the class while a pipeline of the class is watched. Calls of
other pipelines pass through. The class stays the same object.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from onediff_ext.core.forks import fork_safe_lock

logger = logging.getLogger(__name__)

Around = Callable[[Any, Mapping[str, Any]], AbstractContextManager[None]]

_lock = fork_safe_lock()  # also taken when a pipeline is collected, at any moment
_watched_classes: dict[type, _WatchedClass] = {}


def watch_calls(pipe: object, around: Around) -> None:
    """Run each call of a pipeline within a context, until `leave_calls` or the pipeline's deletion.

    Does nothing for an object that cannot be called, and for a module, whose ``__call__`` is that
    of all modules.

    Args:
        pipe: The pipeline.
        around: Returns the context for a pipeline and the arguments of its call by name, defaults
            included. It must not hold the pipeline.
    """
    owner = next((cls for cls in type(pipe).__mro__ if "__call__" in vars(cls)), object)
    method = vars(owner).get("__call__")
    if not isinstance(method, types.FunctionType) or owner.__module__.startswith("torch."):
        return
    with _lock:
        if owner not in _watched_classes:
            _watched_classes[owner] = _WatchedClass(owner, method)
        _watched_classes[owner].add(pipe, around)


def leave_calls(pipe: object) -> None:
    """Take back `watch_calls`; does nothing for a pipeline that is not watched."""
    with _lock:
        for watched in list(_watched_classes.values()):
            watched.discard(id(pipe))


def sampling_steps(arguments: Mapping[str, Any]) -> int | None:
    """Return how many steps a call of a pipeline samples, or None where that is unknown.

    Args:
        arguments: Of the call, by name, as diffusers' pipelines have them. Other pipelines may mean
            something else by these names.
    """
    try:
        for name in ("sigmas", "timesteps"):
            values = arguments.get(name)
            if values is not None:
                return len(values) or None
        steps, strength = arguments["num_inference_steps"], arguments.get("strength")
        if strength is not None:
            # As the pipelines' get_timesteps rounds.
            steps -= int(max(steps - min(steps * strength, steps), 0))
    except (KeyError, TypeError, ValueError):
        return None
    return steps if isinstance(steps, int) and steps > 0 else None


def _arguments(
    signature: inspect.Signature, pipe: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Mapping[str, Any]:
    """The arguments of a call by name; none of a call that Python refuses anyway."""
    try:
        bound = signature.bind(pipe, *args, **kwargs)
    except TypeError:
        return {}
    bound.apply_defaults()
    return bound.arguments


class _WatchedClass:
    """A class whose ``__call__`` is replaced while some of its pipelines are watched.

    Args:
        cls: The class that defines the method.
        method: The method.
    """

    def __init__(self, cls: Any, method: types.FunctionType) -> None:
        self._cls, self._method = cls, method
        signature = inspect.signature(method)
        self._pipes: dict[int, tuple[weakref.ref[object], Around]] = {}
        pipes = self._pipes

        @functools.wraps(method)
        def call(pipe: Any, *args: Any, **kwargs: Any) -> Any:
            watched = pipes.get(id(pipe))
            if watched is None:
                return method(pipe, *args, **kwargs)
            _, around = watched
            with around(pipe, _arguments(signature, pipe, args, kwargs)):
                return method(pipe, *args, **kwargs)

        self._replacement = cls.__call__ = call

    def add(self, pipe: object, around: Around) -> None:
        """Watch a pipeline of this class."""
        number = id(pipe)
        self._pipes[number] = (weakref.ref(pipe, lambda _: self._collected(number)), around)

    def discard(self, number: int) -> None:
        """Stop watching a pipeline; restore the class after the last one."""
        if self._pipes.pop(number, None) is None or self._pipes:
            return
        del _watched_classes[self._cls]
        if vars(self._cls)["__call__"] is self._replacement:
            self._cls.__call__ = self._method
        else:
            logger.warning(
                "another extension has replaced %s.__call__ since; ours only passes calls on now",
                self._cls.__name__,
            )

    def _collected(self, number: int) -> None:
        with _lock:
            self.discard(number)
