"""Arguments are taken apart and put together again as they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from onediff_ext.engine.blocks.argument_parts import JOINT, Members, put_together, take_apart
from onediff_ext.engine.blocks.complex_pairs import ComplexPair, RealArithmetic
from onediff_ext.engine.blocks.family import TOKENS, VECTOR

TEXT = 3
TABLE = (JOINT, None)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument, complex ones also where they are pairs."""
    if isinstance(value, tuple):
        return [tensor for member in value for tensor in flat(member)]
    if isinstance(value, ComplexPair):
        return [torch.view_as_complex(value.pairs)]
    return [value]


@pytest.mark.parametrize(
    ("value", "dims", "names"),
    [
        (noise(2, 5), VECTOR, [VECTOR]),
        ((noise(8, 4), noise(8, 4)), TABLE, [("context", None), ("tokens", None)] * 2),
        (noise(2, 8), ("batch", JOINT), [("batch", "context"), ("batch", "tokens")]),
        (noise(2, 5, 4, dtype=torch.complex64), TOKENS, [TOKENS]),
        (noise(8, 4, dtype=torch.complex64), TABLE, [("context", None), ("tokens", None)]),
        (
            (noise(5, 4, dtype=torch.complex64), noise(3, 4)),
            Members((("tokens", None), ("context", None))),
            [("tokens", None), ("context", None)],
        ),
    ],
)
def test_an_argument_comes_back(value: Any, dims: Any, names: list[Any]) -> None:
    found = take_apart(value, dims, TEXT)
    assert found is not None
    form, parts = found
    assert [part.dims for part in parts] == names
    assert not any(part.tensor.is_complex() for part in parts)
    given = iter([part.tensor for part in parts])
    again = put_together(form, given)
    assert next(given, None) is None
    assert all(map(torch.equal, flat(again), flat(value)))


@pytest.mark.parametrize(
    ("value", "dims"),
    [
        ("text", VECTOR),
        (noise(2, 5, 4), VECTOR),
        ((), TABLE),
        ((noise(8, 4), None), TABLE),
        (noise(2, 4), TABLE),  # fewer tokens than there are of the text
        (noise(8, 4), Members((VECTOR,))),
        ((noise(8, 4),), Members((VECTOR, VECTOR))),
    ],
)
def test_another_argument_is_refused(value: Any, dims: Any) -> None:
    assert take_apart(value, dims, TEXT) is None


def test_forms_have_stable_texts_for_keys() -> None:
    tables = noise(8, 4), noise(8, 4, dtype=torch.complex64)
    form, _ = take_apart(tables, TABLE, TEXT)
    assert repr(form) == "(joint 0 tensor, joint 0 complex)"


def test_rotation_in_real_numbers() -> None:
    x, table = noise(2, 5, 3, 8), noise(5, 4, dtype=torch.complex64)

    def rotate(x: torch.Tensor, table: Any) -> torch.Tensor:
        rotated = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * table.unsqueeze(1)
        return torch.view_as_real(rotated).flatten(3)

    with RealArithmetic():
        found = rotate(x, ComplexPair(torch.view_as_real(table)))
    torch.testing.assert_close(found, rotate(x, table))


@dataclass
class Shift:
    """Such as a modulation that is computed ahead of the blocks."""

    shift: torch.Tensor
    gate: torch.Tensor


def test_dataclasses_come_back_as_namespaces() -> None:
    made = tuple(Shift(noise(2, 1, 5), noise(2, 1, 5)) for _ in range(2))
    form, parts = take_apart(made, ("batch", None, None), TEXT) or pytest.fail("refused")
    assert [part.dims for part in parts] == [("batch", None, None)] * 4
    assert repr(form) == "((shift=tensor, gate=tensor), (shift=tensor, gate=tensor))"
    back = put_together(form, iter(part.tensor for part in parts))
    for one, other in zip(back, made, strict=True):
        assert one.shift is other.shift
        assert one.gate is other.gate


def test_a_dataclass_with_something_else_is_refused() -> None:
    assert take_apart(Shift(noise(2, 1, 5), 0.5), ("batch", None, None), TEXT) is None  # type: ignore[arg-type]
