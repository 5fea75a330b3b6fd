"""Watches the Python code that models run: their classes, the classes' modules, torch itself.

A graph does not see that a function was replaced after the graph was traced.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from onediff_ext.engine.validity.exchanged_code import FirstCode
from onediff_ext.engine.validity.foreign_code import (
    COMPILED_FUNCTIONS,
    COMPILED_NAMES,
    MODULES_OF_FUNCTIONAL,
    TORCH_OPERATORS,
    functional_names,
    replaced_torch_function_reason,
)
from onediff_ext.engine.validity.helper_functions import (
    content_of_cell,
    globals_of_torch,
    helpers_of,
)
from onediff_ext.engine.validity.replaced_helpers import replaced_helper_reason
from onediff_ext.engine.validity.values import is_equal

_KEPT_READINGS = 4
# Python itself keeps these on a class, at the first copy of an instance and the first look at them.
_KEPT_BY_PYTHON = ("__slotnames__", "__annotations__", "__annotations_cache__")
_GONE = object()
_CODE = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__", "__closure__")


class PythonCode:
    """Numbers the states of the code that models run, so that a replaced function is noticed.

    Each state is a generation: a new number after a change, the old number when the change is
    taken back.
    """

    def __init__(self) -> None:
        self._classes: set[type] = set()
        # The names in each namespace, and those that count as known where all count.
        self._getters: list[
            tuple[Mapping[str, Any], Sequence[str], Callable[[Any], Any], set[str] | None]
        ] = []
        self._readings: dict[int, list[Any]] = {}  # by generation, the latest last
        self._moment: Hashable = None
        self._is_in_doubt = False
        self._epoch: Hashable = None  # the last one in which code objects were read
        self._torch_reason: list[str | None] = []  # of this generation, once it is known
        self._helpers: dict[type, list[tuple[Mapping[str, Any], list[str]]]] = {}
        self._helper_reasons: dict[tuple[type, Sequence[str]], str | None] = {}
        self._first = FirstCode()
        self._contents: Mapping[types.FunctionType, tuple[Any, ...]] | None = None
        self._newest = self._generation = 0
        self._add(vars(torch), TORCH_OPERATORS)
        self._add(vars(torch.nn.functional), [*functional_names(), *MODULES_OF_FUNCTIONAL])
        self._add(COMPILED_FUNCTIONS, COMPILED_NAMES)
        self._add(vars(torch.Tensor), _names_of(torch.Tensor), whole=True)
        self._functions = self._python_functions()
        self._readings[0] = [*self._read(), self._codes()]
        self._first.note_contents(self._contents_now())

    def watch(self, classes: Iterable[type]) -> None:
        """Watch these classes too, with their bases and the functions of their modules.

        The present state keeps its number; earlier states are forgotten when a class is new.

        Args:
            classes: Classes of modules and attention processors. Classes that are watched already
                change nothing.
        """
        new = {base for cls in classes for base in cls.__mro__[:-1]} - self._classes
        if not new:
            return
        self.current_generation()
        modules = {base.__module__ for base in new} - {cls.__module__ for cls in self._classes}
        self._classes |= new
        for base in new:
            self._add(vars(base), _names_of(base), whole=True)
        for name in modules:
            namespace = getattr(sys.modules.get(name), "__dict__", {})
            self._add(namespace, [n for n, v in namespace.items() if callable(v)])
        known: dict[int, tuple[Mapping[str, Any], dict[str, None]]] = {}
        for base in new:
            self._helpers[base] = helpers_of([base]) + globals_of_torch(base)
            self._first.note(base, self._helpers[base])
            for namespace, names in self._helpers[base]:
                known.setdefault(id(namespace), (namespace, {}))[1].update(dict.fromkeys(names))
        for namespace, found in known.values():
            self._add(namespace, list(found))
        self._functions = self._python_functions()
        self._readings = {self._generation: [*self._read(), self._codes()]}
        self._contents = None
        self._first.note_contents(self._contents_now())

    def doubt(self) -> None:
        """Note that other extensions' code has run, which may have replaced code of this process.

        What was read before still says why blocks run eager, but no longer that they need not.
        """
        self._is_in_doubt = True

    def settle(self) -> None:
        """Read the code again at the next look if there is a doubt."""
        if self._is_in_doubt:
            self._moment, self._is_in_doubt = None, False

    def current_generation(self, moment: Hashable = None, epoch: Hashable = None) -> int:
        """Return the number of the code's present state.

        Args:
            moment: Equal for calls between which no code is replaced, such as those of one
                forward; the code is read once for them. None reads the code each time.
            epoch: Equal for the calls of one image. What functions consist of is read once for
                them, since each reading of ``function.__code__`` is an audit event. None reads it
                each time.
        """
        if moment is None or moment != self._moment:
            found = self._read()
            if epoch is not None and epoch == self._epoch:
                found.append(self._readings[self._generation][-1])
            else:
                found.append(self._codes())
            self._epoch = epoch
            if not is_equal(found, self._readings[self._generation]):
                self._torch_reason.clear()
                self._helper_reasons.clear()
                self._contents = None
                self._generation = self._generation_of(found)
            self._moment = moment
        return self._generation

    def torch_reason(self) -> str | None:
        """Return why torch's functions are not what they were, or None.

        It is computed once for each generation.
        """
        if not self._torch_reason:
            replaced = replaced_torch_function_reason()
            self._torch_reason[:] = [replaced or self._first.reason_of_torch(self._contents_now())]
        return self._torch_reason[0]

    def helper_reason(self, cls: type, trusted: Sequence[str] = ()) -> str | None:
        """Return why a class's methods, or what they call, are not what they were, or None.

        It is computed once for each generation.

        Args:
            cls: A watched class.
            trusted: Prefixes of modules whose patches are known.
        """
        key = (cls, tuple(trusted))
        if key not in self._helper_reasons:
            found = (
                replaced_helper_reason(namespace, names, trusted)
                for base in cls.__mro__[:-1]
                for namespace, names in self._helpers.get(base, ())
            )
            self._helper_reasons[key] = next(filter(None, found), None) or self._first.reason_of(
                cls, self._helpers, self._contents_now()
            )
        return self._helper_reasons[key]

    def _generation_of(self, found: list[Any]) -> int:
        """Return the number of an equal earlier reading, or a new one."""
        for generation, known in self._readings.items():
            if is_equal(found, known):
                return generation
        self._newest += 1
        self._readings[self._newest] = found
        while len(self._readings) > _KEPT_READINGS:
            del self._readings[next(iter(self._readings))]
        return self._newest

    def _add(
        self, namespace: Mapping[str, Any], names: Sequence[str], *, whole: bool = False
    ) -> None:
        if names:
            getter = operator.itemgetter(*names)
            known = {*names, *_KEPT_BY_PYTHON} if whole else None
            self._getters.append((namespace, names, getter, known))

    def _read(self) -> list[Any]:
        found: list[Any] = []
        for namespace, names, getter, known in self._getters:
            found.append(_values(namespace, names, getter))
            if known is None:
                continue
            kept = sum(map(namespace.__contains__, _KEPT_BY_PYTHON))
            if len(namespace) - kept != len(names):  # somebody has added or deleted some
                found.append([item for item in namespace.items() if item[0] not in known])
        found.append([cls.__mro__ for cls in self._classes])
        return found

    def _codes(self) -> list[Any]:
        """The code, default values and closures of all functions, which change in place."""
        return list(map(_contents, self._functions))

    def _contents_now(self) -> Mapping[types.FunctionType, tuple[Any, ...]]:
        """`_codes` of the present generation, by function."""
        if self._contents is None:
            contents = self._readings[self._generation][-1]
            self._contents = dict(zip(self._functions, contents, strict=True))
        return self._contents

    def _python_functions(self) -> list[types.FunctionType]:
        """The watched functions that have Python code, each once."""
        found: dict[types.FunctionType, None] = {}
        for namespace, names, getter, _ in self._getters:
            values = _values(namespace, names, getter)
            for value in values if isinstance(values, tuple) else (values,):
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if isinstance(function, types.FunctionType):
                    found[function] = None
        return list(found)


def _values(
    namespace: Mapping[str, Any], names: Sequence[str], getter: Callable[[Any], Any]
) -> Any:
    try:
        return getter(namespace)
    except KeyError:  # a name was deleted
        return tuple([namespace.get(name, _GONE) for name in names])


def _names_of(cls: type) -> list[str]:
    return [name for name in vars(cls) if name not in _KEPT_BY_PYTHON]


def _contents(function: types.FunctionType) -> tuple[Any, ...]:
    code, defaults, named, closure = _CODE(function)
    return (
        code,
        defaults,
        None if named is None else tuple(named.items()),
        None if closure is None else tuple(map(content_of_cell, closure)),
    )
