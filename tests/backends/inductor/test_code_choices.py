"""Which choices of Inductor are ours, within builds only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy

from onediff_ext.backends.inductor.code_choices import MOST_CHANNELS, our_choices


def size_types() -> dict[str, str]:
    """Return the types in which a kernel with 32-bit indices takes two sizes."""
    from torch._inductor.codegen import triton
    from torch._inductor.codegen.common import ArgName, SizeArg

    generator: Any = triton
    sizes = [SizeArg("ks0", sympy.Symbol("s0")), SizeArg("xnumel", sympy.Symbol("s1"))]
    types: dict[str, str] = generator.signature_to_meta(
        sizes, size_dtype="tl.int32", argdefs=[ArgName(size.name) for size in sizes]
    )
    return types


def is_persistent(channels: sympy.Expr, hint: str, *, cooperative: bool = False) -> bool:
    """Return whether the choices in effect keep rows in registers."""
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    features = SimpleNamespace(
        reduction_numel=channels, get_reduction_hint=lambda: ReductionHint[hint]
    )
    chosen: bool = V.choices.should_use_persistent_reduction(features, cooperative)
    return chosen


def test_sizes_have_the_type_of_the_indices() -> None:
    outside = size_types()
    with our_choices():
        assert size_types() == {"ks0": "i32", "xnumel": "i32"}
    assert size_types() == outside == {"ks0": "i64", "xnumel": "i32"}


@pytest.mark.parametrize("hint", ["INNER", "DEFAULT"])
@pytest.mark.parametrize("channels", [64, 1536, MOST_CHANNELS])
def test_rows_of_known_length_stay_in_registers(channels: int, hint: str) -> None:
    with our_choices():
        assert is_persistent(sympy.Integer(channels), hint)


def test_other_reductions_are_inductor_s_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.choices import InductorChoices

    asked: list[sympy.Expr] = []

    def own(features: Any, cooperative: bool) -> bool:
        asked.append(features.reduction_numel)
        return False

    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", staticmethod(own))
    channels = [sympy.Integer(MOST_CHANNELS + 1), sympy.Symbol("s0"), sympy.Integer(64)]
    with our_choices():
        assert not is_persistent(channels[0], "INNER")
        assert not is_persistent(channels[1], "INNER")
        assert not is_persistent(channels[2], "OUTER")
        assert not is_persistent(channels[2], "INNER", cooperative=True)
    assert asked == [*channels, channels[2]]


def test_the_choices_end_with_a_build_that_fails() -> None:
    outside = size_types()
    with pytest.raises(ValueError, match="no kernel"), our_choices():
        raise ValueError("no kernel")
    assert size_types() == outside
