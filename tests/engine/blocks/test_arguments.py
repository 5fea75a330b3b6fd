"""Arguments of a block by name: what is known, what is left out, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from onediff_ext.engine.blocks.arguments import named_arguments

ORDER = ("x", "context")


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((1, 2), {}, {"x": 1, "context": 2}),
        ((1,), {"context": 2}, {"x": 1, "context": 2}),
        ((), {"context": 2}, {"context": 2}),
        ((1,), {"mask": None}, {"x": 1}),
        ((1,), {"mask": 3}, None),
        ((1, 2, 3), {}, None),
        ((1,), {"x": 2}, None),
    ],
)
def test_arguments_are_named_or_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], named: dict[str, Any] | None
) -> None:
    assert named_arguments(ORDER, args, kwargs) == named
