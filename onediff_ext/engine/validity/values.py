"""Compares attributes of modules by value: a list that was changed in place is another value."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.object_attributes import attributes_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
_FIXED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
# Tensors on the CPU up to this many numbers are compared by content.
_SMALL_TENSOR = 256
_DEPTH = 6


class _Same:
    """Compares an object by identity, and keeps the object alive."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def is_mutable(value: object) -> bool:
    """Return whether a value can change in place.

    Modules do not count; they are watched in other ways.

    Args:
        value: An attribute of a module. A tuple can change if a member can.
    """
    if isinstance(value, (*_PLAIN, *_FIXED, nn.Module)):
        return False
    if type(value).__module__.startswith("onediff_ext."):
        return False
    if isinstance(value, (tuple, frozenset)):
        return any(map(is_mutable, value))
    return True


def has_no_attributes(value: object) -> bool:
    """Return whether `value_of` an object reads a ``__dict__`` that is empty, and nothing else.

    Args:
        value: Mutable.
    """
    return not isinstance(value, (list, tuple)) and value_of(value) == (type(value), [])


def value_of(value: object, depth: int = _DEPTH) -> object:
    """Return an object that is equal for equal values, with the contents of containers and objects.

    Args:
        value: Anything. Modules and functions count by identity.
        depth: Objects that are nested deeper count by identity.

    Returns:
        An object to compare with ``==``. It keeps the objects alive that it compares by identity.
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return _tensor_value(value)
    if depth == 0 or isinstance(value, (*_FIXED, nn.Module)):
        return _Same(value)
    if isinstance(value, dict):
        items = [(key, value_of(held, depth - 1)) for key, held in dict.items(value)]
        return type(value), items, _behind(value, depth)
    if isinstance(value, Mapping):  # reading it would call code of another package
        return _Same(value)
    if isinstance(value, (list, tuple)):
        return type(value), [value_of(item, depth - 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(value)
    if isinstance(value, types.MethodType):
        return _Same(value.__func__), _Same(value.__self__)
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return functools.partial, [value_of(part, depth - 1) for part in parts]
    if type(value).__module__.startswith("onediff_ext."):
        return _Same(value)
    attributes = attributes_of(value)
    if attributes is not None:
        return type(value), [(name, value_of(held, depth - 1)) for name, held in attributes.items()]
    return _Same(value)


def copy_of(value: Any) -> Any:
    """Return a copy of lists, dicts and sets, to compare with ``==`` later; all else as it is.

    Args:
        value: Anything. Members of its lists and dicts are copied alike.
    """
    if type(value) is dict:
        return {key: copy_of(held) for key, held in value.items()}
    if type(value) is list:
        return list(map(copy_of, value))
    if type(value) is tuple:
        return tuple(map(copy_of, value))
    return set(value) if type(value) is set else value


def _behind(value: dict[Any, Any], depth: int) -> object:
    """The attributes of a dictionary, such as those in which diffusers' configs repeat entries."""
    attributes = getattr(value, "__dict__", None)
    if not attributes or type(value).__module__.startswith("onediff_ext."):
        return None
    return [(name, value_of(held, depth - 1)) for name, held in attributes.items()]


def _tensor_value(tensor: torch.Tensor) -> object:
    if tensor.device.type == "cpu" and tensor.numel() <= _SMALL_TENSOR:
        content: Any = tensor.detach().tolist()
        return tensor.dtype, tensor.shape, content
    # A recording reads it at its address; a copy from the GPU would have to be waited for.
    return _Same(tensor), tensor.data_ptr()


def is_equal(ours: object, theirs: object) -> bool:
    """Return whether two values are equal; False where ``==`` has no single answer (arrays).

    Args:
        ours: Any value.
        theirs: Any value.
    """
    try:
        return bool(ours == theirs)
    except (RuntimeError, ValueError, TypeError):
        return False
