"""Whether modules still are what they were: children, hooks, attributes; by value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

from torch import nn

from onediff_ext.engine.validity.values import is_equal, is_mutable, value_of

# What torch itself keeps in every module.
INTERNAL = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str)


class ModuleState:
    """All that decides what modules compute, besides their code and the values of weights.

    A look compares the attributes of all modules as one list; what can change in place is
    compared by content.

    Args:
        modules: To look at, in order.
        outer: One of them whose own hooks and forward do not count: they run around the rest.
        ignored: Names of attributes that decide nothing.
        parameters: Whether a replaced Parameter counts.
        bare: Those of the modules whose attributes do not count, only their children and hooks.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        outer: nn.Module,
        *,
        ignored: Collection[str] = (),
        parameters: bool = False,
        bare: Iterable[nn.Module] = (),
    ) -> None:
        self._modules, self._outer = list(modules), outer
        self._ignored = frozenset(ignored) | {"forward"}
        self._types = list(map(type, self._modules))
        skipped = {id(module) for module in bare} | {id(outer)}
        self._dicts: list[dict[str, Any]] = []
        for module in self._modules:
            if id(module) not in skipped:
                self._dicts.append(module.__dict__)
            self._dicts.append(module._modules)
            if module is not outer:
                self._dicts += [module._forward_hooks, module._forward_pre_hooks]  # type: ignore[list-item]
            if parameters:
                self._dicts += [module._parameters, module._buffers]
        self._names, self._values = self._read_names(), self._read()
        held = self._mutable_attributes(skipped - {id(outer)})
        self._empty = [value for value in held if type(value) in (list, dict, set) and not value]
        empty = set(map(id, self._empty))
        self._contents = [(value, value_of(value)) for value in held if id(value) not in empty]

    def holds(self) -> bool:
        """Whether nothing has changed."""
        if list(map(type, self._modules)) != self._types or any(self._empty):
            return False
        values = self._read()
        if not is_equal(values, self._values) and not self._decides_the_same(values):
            return False
        return all(is_equal(value_of(value), content) for value, content in self._contents)

    def _read(self) -> list[Any]:
        values = list(chain.from_iterable(map(dict.values, self._dicts)))
        for name, value in self._outer.__dict__.items():
            if name not in self._ignored:
                values += (name, value)
        return values

    def _read_names(self) -> list[str]:
        names = list(chain.from_iterable(self._dicts))
        for name in self._outer.__dict__:
            if name not in self._ignored:
                names += (name, name)
        return names

    def _decides_the_same(self, values: list[Any]) -> bool:
        """Whether all but the ignored attributes is what it was: A1111 names each layer again with
        every checkpoint, and notes what it has merged into it."""
        names = self._read_names()
        ours, theirs = self._deciding(self._names, self._values), self._deciding(names, values)
        if len(ours) != len(theirs) or not all(map(_same, ours, theirs)):
            return False
        self._names, self._values = names, values  # the quickest to compare with next time
        return True

    def _deciding(self, names: list[str], values: list[Any]) -> list[tuple[str, Any]]:
        pairs = zip(names, values, strict=True)
        return [(name, value) for name, value in pairs if name not in self._ignored - {"forward"}]

    def _mutable_attributes(self, skipped: Collection[int]) -> list[Any]:
        ignored = INTERNAL | self._ignored
        return [
            value
            for module in self._modules
            if id(module) not in skipped
            for name, value in module.__dict__.items()
            if name not in ignored and is_mutable(value)
        ]


def interfering_in(modules: Sequence[nn.Module], names: Sequence[str]) -> list[bool]:
    """For each module and name: whether it has such an attribute that is not empty."""
    return [bool(module.__dict__.get(name)) for module in modules for name in names]


def _same(ours: tuple[str, Any], theirs: tuple[str, Any]) -> bool:
    (name, value), (other_name, other) = ours, theirs
    if name != other_name:
        return False
    return value is other or (
        type(value) is type(other) and isinstance(value, _PLAIN) and value == other
    )
