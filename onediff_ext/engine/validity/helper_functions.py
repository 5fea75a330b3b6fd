"""The functions that methods of classes call, and those that these call, by module and name."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from onediff_ext.engine.validity.foreign_code import is_called_by_no_forward

Namespace = Mapping[str, Any]


def helpers_of(classes: Iterable[type]) -> list[tuple[Namespace, list[str]]]:
    """Return the names under which methods, and their helpers, find functions.

    A helper is followed into other Python modules of the classes' own packages: diffusers' UNet
    blocks call `apply_freeu`, which calls `fourier_filter` in its own module.

    Args:
        classes: Classes of modules and attention processors.

    Returns:
        Namespaces of Python modules, and the names of functions in each.
    """
    found: dict[int, tuple[Namespace, dict[str, None]]] = {}
    classes = list(classes)
    packages = {cls.__module__.partition(".")[0] for cls in classes} - {"torch"}
    waiting = [function for cls in classes for function in _methods(cls)]
    seen: set[types.FunctionType] = set()
    while waiting:
        function = waiting.pop()
        if function in seen or _package(function.__globals__) not in packages:
            continue
        seen.add(function)
        for namespace, name in _named_in(function, packages):
            found.setdefault(id(namespace), (namespace, {}))[1][name] = None
            value = namespace[name]
            if isinstance(value, types.FunctionType):
                waiting.append(value)
        for cell in function.__closure__ or ():
            held = _content(cell)
            if isinstance(held, types.FunctionType):  # what a decorator has wrapped
                waiting.append(held)
    return [(namespace, list(names)) for namespace, names in found.values()]


def _methods(cls: type) -> Iterator[types.FunctionType]:
    for name, value in vars(cls).items():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType) and not is_called_by_no_forward(name):
            yield function


def _named_in(
    function: types.FunctionType, packages: Collection[str]
) -> Iterator[tuple[Namespace, str]]:
    """The functions that a function's code names, directly or as attributes of a Python module."""
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, types.FunctionType):
            yield function.__globals__, name
        elif isinstance(value, types.ModuleType) and _package(vars(value)) in packages:
            for inner in names & vars(value).keys():
                if isinstance(vars(value)[inner], types.FunctionType):
                    yield vars(value), inner


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _package(namespace: Namespace) -> str:
    return str(namespace.get("__name__", "")).partition(".")[0]


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
