"""Modules and attributes that an extension left on a model's layers, and that no code reads.

Extensions keep objects of their own on layers: a blur for attention maps, a strength. They often
stay when the extension is off. One that no code of the model can read decides nothing.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from onediff_ext.engine.validity.helper_functions import content_of_cell, helpers_of

_mentioned_by_class: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()
# Names whose mention in a method may mean that it goes through whatever a module holds.
_WALKS = frozenset(
    {
        *("children", "named_children", "modules", "named_modules", "_modules", "apply"),
        *("__dict__", "vars", "dir", "__getattribute__"),
    }
)
_GETATTR = "getattr"
# What descriptors of functions hold.
_PARTS = ("fget", "fset", "__func__", "func")
_MADE_BY_CODE = 1 << 9  # in a class's ``__flags__``: ``Py_TPFLAGS_HEAPTYPE``
# Where a call of a module, or of an attention processor, begins.
_ENTRIES = ("forward", "__call__", "_forward")


class MentionedNames:
    """What the code of a model mentions.

    Args:
        modules: Of the model, without those that may be left over.
        processors: Its attention processors.
    """

    def __init__(self, modules: Collection[nn.Module], processors: Iterable[object]) -> None:
        self._methods: dict[str, list[types.FunctionType]] = {}
        self._names: set[str] = set()
        classes = {type(each) for each in (*modules, *processors)}
        bases = {base for cls in classes for base in cls.__mro__[:-1]} - {nn.Module}
        for base in bases:
            self._add(vars(base))
        for module in modules:
            self._add(vars(module))
        functions = [function for found in self._methods.values() for function in found]
        packages = {str(f.__globals__.get("__name__", "")).partition(".")[0] for f in functions}
        for namespace, names in helpers_of(bases, packages):
            self._names.update(names)
            for function in map(namespace.get, names):
                for each in _functions_in(function):
                    self._names |= _mentioned(each.__code__)
        self._walks: bool | None = None

    def _add(self, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            for function in _functions_in(value):
                self._methods.setdefault(name, []).append(function)
                self._names |= _mentioned(function.__code__)

    def __contains__(self, name: str) -> bool:
        """Whether a method, or a function that one calls in its own package, has this name in it,
        as an attribute or as a string."""
        return name in self._names

    @property
    def walk(self) -> bool:
        """Whether a method that a forward may call goes through whatever a module holds, or reads
        an attribute whose name it computes."""
        if self._walks is None:
            self._walks = any(
                _WALKS & _mentioned(f.__code__) or _computes_names(f) for f in self._called()
            )
        return self._walks

    def _called(self) -> Iterator[types.FunctionType]:
        """The methods that calls may reach, by their names."""
        waiting, seen = list(_ENTRIES), set[str]()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            for function in self._methods.get(name, ()):
                yield function
                waiting += _mentioned(function.__code__)


class LeftOvers:
    """What an extension left on the modules of a model, and that no code reads.

    Modules: of unknown classes, without weights. Attributes: of any kind. Their name stands in no
    code of the other modules' classes, no forward goes through all that a module holds, and none
    reads an attribute whose name it computes.

    Args:
        root: A block or a model.
        processors: Attention processors of its modules.
        is_known: Whether a module may be part of a graph.

    Attributes:
        modules: Ids of the modules that were left, and of all modules within them.
    """

    def __init__(
        self,
        root: nn.Module,
        processors: Iterable[object],
        is_known: Callable[[nn.Module], bool],
    ) -> None:
        self._processors = list(processors)
        found = {
            (id(module), name): child
            for module in root.modules()
            if is_known(module) and not _is_container(module)
            for name, child in module._modules.items()
            if child is not None and not is_known(child) and _has_no_weights(child)
        }
        self._kept = list(_reached(root, found))
        self._found: MentionedNames | None = None
        self.modules: frozenset[int] = frozenset()
        if found and not self._mentioned.walk:
            left = {place: each for place, each in found.items() if place[1] not in self._mentioned}
            inside = {id(each) for child in left.values() for each in child.modules()}
            self.modules = frozenset(inside - {id(each) for each in _reached(root, left)})

    def has_attribute(self, module: nn.Module, name: str) -> bool:
        """Return whether an attribute is one of them.

        Args:
            module: One of the model's modules.
            name: Of an attribute that is neither a module nor a weight.
        """
        return (
            name not in _mentioned_by(type(module))
            and not _is_container(module)
            and name not in self._mentioned
            and not self._mentioned.walk
        )

    @property
    def _mentioned(self) -> MentionedNames:
        if self._found is None:  # rarely needed
            self._found = MentionedNames(self._kept, self._processors)
        return self._found


def _reached(module: nn.Module, without: Container[tuple[int, str]]) -> Iterator[nn.Module]:
    """A module and those within it, except what lies behind the given ids and names."""
    yield module
    for name, child in module._modules.items():
        if child is not None and (id(module), name) not in without:
            yield from _reached(child, without)


def _mentioned_by(cls: type) -> frozenset[str]:
    """What a class and its bases mention. Looked up once: more names only keep more."""
    if cls not in _mentioned_by_class:
        values = [each for base in cls.__mro__[:-1] for each in vars(base).values()]
        names = [_mentioned(f.__code__) for each in values for f in _functions_in(each)]
        _mentioned_by_class[cls] = frozenset().union(*names)
    return _mentioned_by_class[cls]


def _is_container(module: nn.Module) -> bool:
    """Whether a module hands out its children without naming them."""
    return any(hasattr(type(module), name) for name in ("__iter__", "__getitem__"))


def _has_no_weights(module: nn.Module) -> bool:
    return not any(each._parameters or each._buffers for each in module.modules())


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """The functions that an attribute consists of, with those that its decorators hold."""
    waiting, seen = [value], dict[int, Any]()  # kept, so that no other object gets an `id`
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        waiting += [getattr(each, part) for part in _parts_of(type(each))]
        if isinstance(each, types.FunctionType):
            yield each
            waiting += [
                each.__dict__.get("__wrapped__"),
                *map(content_of_cell, each.__closure__ or ()),
            ]


def _parts_of(cls: type) -> tuple[str, ...]:
    """Which of `_PARTS` instances of a class have."""
    return _parts_of_built_in(cls) if not cls.__flags__ & _MADE_BY_CODE else _listed_parts(cls)


def _listed_parts(cls: type) -> tuple[str, ...]:
    names = dir(cls)
    return tuple(part for part in _PARTS if part in names)


# Nobody can change these classes, and most attributes are of one of them.
_parts_of_built_in = functools.cache(_listed_parts)


@functools.lru_cache(maxsize=4096)
def _computes_names(function: types.FunctionType) -> bool:
    """Whether a function may read attributes whose names do not stand in it."""
    if _GETATTR not in _mentioned(function.__code__):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (OSError, TypeError, SyntaxError):
        return True
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1)
    named = [node.func for node in calls if isinstance(node.args[1], ast.Constant)]
    return any(
        isinstance(node, ast.Name) and node.id == _GETATTR and node not in named
        for node in ast.walk(tree)
    )


def _mentioned(code: types.CodeType) -> set[str]:
    """Names and strings in a function, and in the functions within it."""
    found, waiting = set(code.co_names), list(code.co_consts)
    while waiting:
        constant = waiting.pop()
        if isinstance(constant, types.CodeType):
            found |= _mentioned(constant)
        elif isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, (tuple, frozenset)):
            waiting += constant
    return found
