"""Code of a known package in the place of other code, such as ``F.silu = F.mish``.

Such code is no other extension's, and the key of a kind says nothing of it: it names classes and
packages. So a graph may stand only for code that is what it was when it was seen first.
"""

from __future__ import annotations

import types
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from onediff_ext.engine.validity.foreign_code import (
    CALLING,
    COMPILED_FUNCTIONS,
    COMPILED_NAMES,
    MODULES_OF_FUNCTIONAL,
    TORCH_OPERATORS,
    defining_module,
    functional_names,
    is_called_by_no_forward,
    is_code,
    is_foreign,
)
from onediff_ext.engine.validity.helper_functions import reads_attribute
from onediff_ext.engine.validity.values import is_equal

# By function: its code, default values and keyword defaults. What a closure holds may change for
# reasons of its own, such as a count of warnings.
Contents = Mapping[types.FunctionType, tuple[Any, ...]]
_Helpers = Iterable[tuple[Mapping[str, Any], Sequence[str]]]
# Its owner's name, its globals or attributes, which of them count, what they were, its package.
_Watched = tuple[str, Mapping[str, Any], Sequence[str], dict[str, Any | None], str]
_PLAIN = (type(None), bool, int, float, str, torch.dtype)
_OURS = "onediff_ext."


class FirstCode:
    """Functions of torch, of classes and of their helpers as they were when they were seen first.

    Other extensions' code is left to `foreign_code`: what it has replaced counts as seen when it
    is put back. This package's own stand-ins in a host, which come and go with its jobs, do not
    count either.
    """

    def __init__(self) -> None:
        self._of_classes: dict[type, dict[str, Any | None]] = {}
        self._mros: dict[type, tuple[type, ...]] = {}
        self._plain: dict[type, dict[str, Any]] = {}
        self._of_modules: dict[int, dict[str, Any | None]] = {}  # by id of their globals
        self._contents: dict[types.FunctionType, tuple[Any, ...]] = {}

    def note(self, cls: type, helpers: _Helpers) -> None:
        """See a class, if this is the first time.

        Args:
            cls: The class, without its bases.
            helpers: What its methods call, from `helpers_of`.
        """
        if cls not in self._of_classes:
            self._of_classes[cls] = _known(vars(cls), _methods(cls), _own(cls.__module__))
            self._mros[cls], self._plain[cls] = cls.__mro__, _plain_of(cls)
        for namespace, names in helpers:
            first = self._of_modules.setdefault(id(namespace), {})
            new = [name for name in names if name not in first]
            first.update(_known(namespace, new, _own(namespace.get("__name__"))))

    def note_contents(self, contents: Contents) -> None:
        """See what functions consist of, if this is the first time.

        Args:
            contents: Of all watched functions.
        """
        for function, content in contents.items():
            self._contents.setdefault(function, content[:3])

    def reason_of_torch(self, contents: Contents) -> str | None:
        """Say which function of torch is another one than at first, or None.

        Args:
            contents: As they are now.

        Returns:
            One line for people.
        """
        found = (self._difference(*each, contents) for each in _TORCH)
        return next(filter(None, found), None)

    def reason_of(
        self, cls: type, helpers: Mapping[type, _Helpers], contents: Contents
    ) -> str | None:
        """Say which method of a class, or what it calls, is another one than at first, or None.

        Args:
            cls: A class that was noted, with its bases.
            helpers: What the methods of each class call.
            contents: As they are now.

        Returns:
            One line for people.
        """
        for base in cls.__mro__[:-1]:
            first, own = self._of_classes.get(base, {}), _own(base.__module__)
            if base.__mro__ != self._mros.get(base):
                return f"{base.__qualname__} has other bases than it had"
            plain, now = self._plain.get(base, {}), _plain_of(base)
            for name in plain.keys() | now.keys():
                if plain.get(name) != now.get(name) and reads_attribute(cls, name):
                    return f"{base.__qualname__}.{name} is not what it was"
            # Such as a method of its own where it had its base's.
            new = [
                name
                for name in _methods(base)
                if name not in first and (_inherits(base, name) or reads_attribute(cls, name))
            ]
            if any(not _is_foreign(vars(base)[name], own) for name in new):
                return f"{base.__qualname__}.{new[0]} is not what it was"
            found: list[_Watched] = [(base.__qualname__, vars(base), list(first), first, own)]
            for namespace, names in helpers.get(base, ()):
                module = str(namespace.get("__name__"))
                known = self._of_modules.get(id(namespace), {})
                found.append((module, namespace, names, known, _own(module)))
            reason = next(filter(None, (self._difference(*each, contents) for each in found)), None)
            if reason is not None:
                return reason
        return None

    def _difference(
        self,
        owner: str,
        namespace: Mapping[str, Any],
        names: Sequence[str],
        first: dict[str, Any | None],
        own: str,
        contents: Contents,
    ) -> str | None:
        for name in names:
            value = _traced(namespace.get(name))
            counts = _counts(value) or isinstance(first.get(name), types.ModuleType)
            if value is not None and (not counts or _is_foreign(value, own)):
                continue
            if first.get(name) is None:
                first[name] = value
            elif value is not first[name]:
                return f"{owner}.{name} is not what it was"
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType) and function in contents:
                content = contents[function][:3]
                if not is_equal(content, self._contents.setdefault(function, content)):
                    return f"{owner}.{name} is not what it was"
        return None


def _known(namespace: Mapping[str, Any], names: Iterable[str], own: str) -> dict[str, Any | None]:
    """The values of these names; None for what does not count, and for another extension's."""
    found = {name: _traced(namespace.get(name)) for name in names}
    return {n: v if _counts(v) and not _is_foreign(v, own) else None for n, v in found.items()}


def _counts(value: object) -> bool:
    """Whether a value is code, or a Python module in whose place another's functions may be."""
    return is_code(value) or isinstance(value, types.ModuleType)


def _methods(cls: type) -> list[str]:
    names: Iterable[str] = CALLING if cls is nn.Module else vars(cls)
    return [n for n in names if not is_called_by_no_forward(n) and is_code(vars(cls).get(n))]


def _plain_of(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)


def _inherits(cls: type, name: str) -> bool:
    return any(name in vars(base) for base in cls.__mro__[1:])


def _is_foreign(value: object, own: str) -> bool:
    module = defining_module(value)
    return is_foreign(module, (own,)) or (own != _OURS and module.startswith(_OURS))


def _traced(value: Any) -> Any:
    """The function in whose place torch's tracer puts a wrapper for the time of an export."""
    while getattr(value, "__globals__", {}).get("__name__", "").startswith("torch.fx."):
        if not hasattr(value, "__wrapped__"):
            break
        value = value.__wrapped__
    return value


def _torch_at_first() -> Iterable[_Watched]:
    functional = vars(torch.nn.functional)
    tensor = ChainMap(*(cast("dict[str, Any]", vars(cls)) for cls in torch.Tensor.__mro__[:-1]))
    for owner, namespace, names in (
        ("torch", vars(torch), TORCH_OPERATORS),
        ("torch.nn.functional", functional, [*functional_names(), *MODULES_OF_FUNCTIONAL]),
        ("torch._C._nn", COMPILED_FUNCTIONS, COMPILED_NAMES),
        ("torch.Tensor", tensor, list(tensor)),  # most operators are its base's
    ):
        yield owner, namespace, names, _known(namespace, names, "torch."), "torch."


def _own(module: object) -> str:
    return str(module).partition(".")[0] + "."


_TORCH = list(_torch_at_first())  # as early as can be: others may exchange functions at any time
