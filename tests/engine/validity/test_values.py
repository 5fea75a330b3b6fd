"""Values of attributes are compared with the contents of containers and objects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from onediff_ext.engine.validity.values import value_of


class Settings:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Slotted:
    __slots__ = ("scale", "unset")

    def __init__(self, scale: list[float]) -> None:
        self.scale = scale


class SlottedToo(Slotted):
    """Has a dictionary beside the slots."""


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [1, 2], lambda v: v.append(3)),
        (lambda: [1, [2]], lambda v: v[1].append(3)),
        (lambda: {"a": 1}, lambda v: v.update(a=2)),
        (lambda: {1, 2}, lambda v: v.add(3)),
        (lambda: torch.zeros(3), lambda v: v.data.add_(1)),
        (lambda: Settings(scale=[1.0]), lambda v: v.scale.__setitem__(0, 0.2)),
        (lambda: functools.partial(max, [1]), lambda v: v.args[0].append(2)),
        (lambda: Slotted([1.0]), lambda v: v.scale.append(0.2)),
        (lambda: Slotted([1.0]), lambda v: setattr(v, "unset", 1)),
        (lambda: SlottedToo([1.0]), lambda v: v.scale.append(0.2)),
        (lambda: SlottedToo([1.0]), lambda v: setattr(v, "other", 1)),
        (lambda: (1, {"a": [2]}), lambda v: v[1]["a"].clear()),
    ],
)
def test_values_that_change_in_place(
    make: Callable[[], Any], change: Callable[[Any], None]
) -> None:
    value = make()
    before = value_of(value)
    assert before == value_of(value)
    change(value)
    assert before != value_of(value)


def test_mappings_of_others_are_not_read() -> None:
    class Broken(Mapping[str, int]):
        def __getitem__(self, key: str) -> int:
            raise KeyError(key)

        def __iter__(self) -> Any:
            return iter(["a"])

        def __len__(self) -> int:
            return 1

    broken = Broken()
    assert value_of([broken]) == value_of([broken])
    assert value_of([broken]) != value_of([Broken()])


def test_equal_settings_of_other_classes_differ() -> None:
    class Other(Settings):
        pass

    assert value_of(Settings(a=1)) == value_of(Settings(a=1))
    assert value_of(Settings(a=1)) != value_of(Other(a=1))
    assert value_of(1) != value_of(True)
