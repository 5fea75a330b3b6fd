"""Guidance steps in the forms of all front ends, and the steps that they mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onediff_ext.core.errors import OptionError
from onediff_ext.core.guidance_options import ALL_STEPS, GuidanceOptions


@pytest.mark.parametrize(
    ("value", "options"),
    [
        ("off", ALL_STEPS), ("", ALL_STEPS), (None, ALL_STEPS), (False, ALL_STEPS),
        (" Interval:0-0.6 ", GuidanceOptions("interval", 0, 0.6)),
        ("interval:.25-1", GuidanceOptions("interval", 0.25, 1)),
        ("adaptive", GuidanceOptions("adaptive", similarity=0.991)),
        ("ADAPTIVE:0.98", GuidanceOptions("adaptive", similarity=0.98)),
        ("gate:0.4", GuidanceOptions("gate", end=0.4)),
        (" GATE:1 ", GuidanceOptions("gate")),
        (GuidanceOptions("interval", 0.1, 0.2), GuidanceOptions("interval", 0.1, 0.2)),
    ],
)  # fmt: skip
def test_everything_that_front_ends_have_is_read(value: object, options: GuidanceOptions) -> None:
    assert GuidanceOptions.parse(value) == options


@pytest.mark.parametrize(
    "wrong",
    ["on", "0.6", "interval", "interval:", "interval:0.6", "interval:0.6-0.2", "interval:0-1.5",
     "interval:0.5-0.5", "interval:nan-1", "interval:-1-1", "interval:0-0.6-1", "adaptive:",
     "adaptive:0", "adaptive:1.1", "adaptive:x", "off:1", "gate", "gate:",
     "gate:0", "gate:1.1", "gate:0-0.4", 0.6, True, ["interval:0-0.6"]],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_a_hint(wrong: object) -> None:
    with pytest.raises(OptionError) as refused:
        GuidanceOptions.parse(wrong)
    assert refused.value.hint


def test_only_what_leaves_guidance_out_is_on() -> None:
    texts = ("off", "interval:0-1", "interval:0-0.9", "interval:0.1-1", "adaptive:1",
             "gate:1", "gate:0.9")  # fmt: skip
    found = [GuidanceOptions.parse(text).is_on for text in texts]
    assert found == [False, False, True, True, True, False, True]


_shares = st.floats(0, 1)


@given(span=st.tuples(_shares, _shares).map(sorted).filter(lambda span: span[0] < span[1]))
def test_an_interval_is_read_back_as_it_was(span: list[float]) -> None:
    options = GuidanceOptions("interval", *span)
    assert GuidanceOptions.parse(str(options)) == options


@given(similarity=st.floats(0, 1, exclude_min=True))
def test_a_similarity_is_read_back_as_it_was(similarity: float) -> None:
    options = GuidanceOptions("adaptive", similarity=similarity)
    assert GuidanceOptions.parse(str(options)) == options
    assert str(GuidanceOptions.parse(str(ALL_STEPS))) == "off"


@given(end=st.floats(0, 1, exclude_min=True))
def test_a_gate_is_read_back_as_it_was(end: float) -> None:
    options = GuidanceOptions("gate", end=end)
    assert GuidanceOptions.parse(str(options)) == options


def test_a_gate_has_no_start() -> None:
    with pytest.raises(OptionError):
        GuidanceOptions("gate", 0.1, 0.4)


@pytest.mark.parametrize(
    ("text", "steps", "kept"),
    [("gate:0.4", 10, 3), ("gate:0.4", 20, 7), ("gate:0.01", 10, 0), ("gate:1", 10, 9)],
)
def test_the_last_step_with_guidance_keeps_cross_attention(
    text: str, steps: int, kept: int
) -> None:
    options = GuidanceOptions.parse(text)
    assert [n for n in range(steps) if options.keeps_attention(n, steps)] == [kept]
    assert [n for n in range(steps) if options.has_guidance(n, steps)] == list(range(kept + 1))
    interval = GuidanceOptions.parse("interval:0-0.4")
    assert not any(interval.keeps_attention(n, steps) for n in range(steps))


@pytest.mark.parametrize(
    ("text", "steps", "guided"),
    [
        ("interval:0-0.6", 20, range(12)),
        ("interval:0-0.7", 10, range(7)),  # 0.7 * 10 is 7.000000000000001
        ("interval:0.3-0.6", 10, range(3, 6)),
        ("interval:0-0.5", 5, range(3)),
        ("interval:0.5-1", 5, range(3, 5)),
        ("interval:0-0.01", 20, range(1)),
        ("off", 3, range(3)),
        ("adaptive:0.9", 3, range(3)),
    ],
)
def test_the_steps_of_an_interval(text: str, steps: int, guided: range) -> None:
    options = GuidanceOptions.parse(text)
    assert [n for n in range(steps) if options.has_guidance(n, steps)] == list(guided)


@given(share=st.floats(0, 1), steps=st.integers(1, 200))
def test_two_intervals_share_out_all_steps(share: float, steps: int) -> None:
    if share in (0, 1):
        return
    parts = [GuidanceOptions("interval", 0, share), GuidanceOptions("interval", share, 1)]
    for step in range(steps):
        assert sum(part.has_guidance(step, steps) for part in parts) == 1
