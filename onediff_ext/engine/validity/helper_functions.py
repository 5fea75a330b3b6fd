"""What methods of classes read by name: functions, what these call in turn, modules, constants."""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from onediff_ext.engine.validity.foreign_code import is_called_by_no_forward

Namespace = Mapping[str, Any]

_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_CONSTANT = (type(None), bool, int, float, str)

_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]

_names_read: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()
_modules_named: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()


def helpers_of(
    classes: Iterable[type], packages: Iterable[str] = ()
) -> list[tuple[Namespace, list[str]]]:
    """Return the names of modules' globals that methods, and their helpers, read.

    These are functions, classes, Python modules (``F`` may be replaced by an object of another
    extension) and plain constants. Other values, such as tables and caches, may change at any call
    for reasons of their own; they do not count.

    A helper is followed into other Python modules of the classes' own packages: diffusers' UNet
    blocks call `apply_freeu`, which calls `fourier_filter` in its own module.

    Args:
        classes: Classes of modules and attention processors.
        packages: More packages into which helpers are followed.

    Returns:
        Namespaces of Python modules, and the names in each.
    """
    found: dict[int, tuple[Namespace, dict[str, None]]] = {}
    classes = list(classes)
    packages = {*packages, *(cls.__module__.partition(".")[0] for cls in classes)} - {"torch"}
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
            held = content_of_cell(cell)
            if isinstance(held, types.FunctionType):  # what a decorator has wrapped
                waiting.append(held)
    return [(namespace, list(names)) for namespace, names in found.values()]


def modules_named_by(cls: type) -> frozenset[str]:
    """Return the Python modules of a class's own package that its methods run code of directly.

    Args:
        cls: A class of modules; for one of torch there are none.

    Returns:
        Full names: of the class, its bases, and of the functions and classes that their methods
        name. What those call in turn is left out, so a host's whole package is not reached.
    """
    package = _package({"__name__": cls.__module__})
    if package == "torch":
        return frozenset()
    if cls in _modules_named:
        return _modules_named[cls]
    bases = [base for base in cls.__mro__ if _package({"__name__": base.__module__}) == package]
    found = {base.__module__ for base in bases}
    for function in (function for base in bases for function in _methods(base)):
        for namespace, name in _named_in(function, {package}):
            value = namespace[name]
            # An attribute of a Python module is looked up there, whatever stands in its place.
            is_attribute = namespace is not function.__globals__
            place = namespace.get("__name__") if is_attribute else getattr(value, "__module__", "")
            if isinstance(value, _CODE) and _package({"__name__": place}) == package:
                found.add(str(place))
    return _modules_named.setdefault(cls, frozenset(found))


def globals_of_torch(cls: type) -> list[tuple[Namespace, list[str]]]:
    """Return the Python modules and functions that methods of a class of torch read by name.

    Args:
        cls: Any class. For those of other packages, `helpers_of` says more.

    Returns:
        As for `helpers_of`.
    """
    if _package({"__name__": cls.__module__}) != "torch" or cls is nn.Module:
        return []
    namespace = vars(sys.modules[cls.__module__])
    mentioned = {name for function in _methods(cls) for name in _names(function.__code__)}
    kinds = (types.ModuleType, types.FunctionType)
    names = [name for name in mentioned if isinstance(namespace.get(name), kinds)]
    return [(namespace, names)] if names else []


def _methods(cls: type) -> Iterator[types.FunctionType]:
    for name, value in vars(cls).items():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType) and not is_called_by_no_forward(name):
            yield function


def _named_in(
    function: types.FunctionType, packages: Collection[str]
) -> Iterator[tuple[Namespace, str]]:
    """What a function's code names, directly or as attributes of a Python module."""
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, (*_CODE, *_CONSTANT)) or _stands_in(value):
            yield function.__globals__, name
        if isinstance(value, types.ModuleType) and _package(vars(value)) in packages:
            for inner in names & vars(value).keys():
                if isinstance(vars(value)[inner], (types.FunctionType, *_CONSTANT)):
                    yield vars(value), inner


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that code reads, as globals or attributes. A global that is only written is none.

    Such a global tells of the last call: Forge notes in one whether memory was freed.
    """
    if _STORE_GLOBAL in code.co_code[::2]:  # also where a cache entry looks like it
        for step in dis.get_instructions(code):
            if step.opcode in dis.hasname and step.opcode != _STORE_GLOBAL:
                yield step.argval
    else:
        yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _stands_in(value: object) -> bool:
    """Whether a value may have taken a Python module's place."""
    return isinstance(value, types.SimpleNamespace) or "__getattr__" in vars(type(value))


def _package(namespace: Namespace) -> str:
    return str(namespace.get("__name__", "")).partition(".")[0]


def content_of_cell(cell: Any) -> object:
    """Return what a closure's cell holds; None for nothing.

    Args:
        cell: From a function's ``__closure__``.
    """
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def reads_attribute(cls: type, name: str) -> bool:
    """Whether the code of a class mentions an attribute.

    Extensions keep notes of their own on modules; no code of the class reads these.

    Args:
        cls: Class of a module. Its bases count too, `nn.Module` does not.
        name: The attribute's name.
    """
    if cls not in _names_read:
        functions = [
            value.__code__
            for base in cls.__mro__[:-1]
            if base is not nn.Module
            for value in vars(base).values()
            if isinstance(value, types.FunctionType)
        ]
        _names_read[cls] = frozenset(name for code in functions for name in code.co_names)
    return name in _names_read[cls]
