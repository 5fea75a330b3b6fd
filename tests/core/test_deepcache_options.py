"""DeepCache's options in the forms of all front ends, and its schedules."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onediff_ext.core.deepcache_options import (
    LEVELS,
    OFF,
    DeepCacheOptions,
    few_steps_reason,
)
from onediff_ext.core.errors import OptionError
from onediff_ext.engine.deepcache.schedule import is_full, nonuniform_full_calls


def test_more_evaluations_than_were_expected_go_on_at_the_interval() -> None:
    for text in ("3", "3 schedule=nonuniform"):
        options = DeepCacheOptions.parse(text)
        assert [is_full(options, 10 + age, 10, 10) for age in (1, 2, 3)] == [False, False, True]
    assert is_full(DeepCacheOptions.parse("3 end=0.8"), 11, 10, 10)


@pytest.mark.parametrize(
    ("given_value", "interval"),
    [
        *LEVELS.items(),
        ("Medium", 3), ("3", 3), (4, 4), (2.0, 2), (True, 3), (1, 1), (0, 1), ("0", 1),
        ("", 1), (None, 1), (False, 1), ({"interval": 7}, 7), (DeepCacheOptions(6), 6),
        ("interval=4", 4), ("depth=2", 3),
    ],
)  # fmt: skip
def test_everything_that_front_ends_have_is_read(given_value, interval):
    assert DeepCacheOptions.parse(given_value).interval == interval


def test_levels_are_two_three_and_five():
    assert [LEVELS[name] for name in ("off", "light", "medium", "strong")] == [1, 2, 3, 5]
    assert not DeepCacheOptions.parse("off").is_on
    assert DeepCacheOptions.parse("light").is_on


@pytest.mark.parametrize(
    "wrong",
    ["foo", "3 4", "3 depth=", "3 depth=x", "3 nonsense=1", "51", "-1", "3 depth=-1", 2.5, "2.5",
     "3 start=0.9 end=0.1", "3 schedule=random", "3 power=9", "3 centre=2", [3], {"intervall": 3}],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_a_hint(wrong):
    with pytest.raises(OptionError) as refused:
        DeepCacheOptions.parse(wrong)
    assert refused.value.hint


_shares = st.floats(0, 1).map(lambda x: round(x, 3))


@given(
    interval=st.integers(1, 50),
    depth=st.integers(0, 11),
    span=st.tuples(_shares, _shares).map(sorted),
    schedule=st.sampled_from(["uniform", "nonuniform"]),
    centre=_shares,
    power=st.floats(1, 4).map(lambda x: round(x, 2)),
)
def test_text_is_read_back_as_it_was(interval, depth, span, schedule, centre, power):
    options = DeepCacheOptions(interval, depth, *span, schedule, centre, power)
    assert DeepCacheOptions.parse(str(options)) == options


def test_a_plain_interval_is_written_plainly():
    assert str(DeepCacheOptions(3)) == "3"
    assert str(DeepCacheOptions(5, depth=1, end=0.8)) == "5 depth=1 end=0.8"


def test_a_label_is_a_levels_name_and_is_read_back():
    for name in LEVELS:
        assert DeepCacheOptions.parse(name).label == name
    for text in ("4", "3 depth=1"):
        assert DeepCacheOptions.parse(DeepCacheOptions.parse(text).label).label == text


@pytest.mark.parametrize("name", ["LCM", "LCMScheduler", "TCD", "sd_xl_turbo_1.0", "Lightning"])
def test_few_step_samplers_are_refused_with_a_reason(name):
    assert "gains nothing" in few_steps_reason(name, 20)


def test_few_steps_are_refused_and_usual_ones_are_not():
    assert "4" in few_steps_reason("Euler a", 4)
    assert few_steps_reason("Euler a", 20) is None
    assert few_steps_reason("DPM++ 2M Karras", None) is None


def full_calls(options: DeepCacheOptions, total: int, *, known: bool = True) -> list[int]:
    """The calls of one kind in a picture of `total` evaluations."""
    found: list[int] = []
    for index in range(total):
        if is_full(options, index, total if known else None, found[-1] if found else None):
            found.append(index)
    return found


def test_a_uniform_schedule_is_every_nth_call():
    assert full_calls(DeepCacheOptions(3), 10) == [0, 3, 6, 9]
    assert full_calls(DeepCacheOptions(3), 10, known=False) == [0, 3, 6, 9]
    assert full_calls(OFF, 4) == [0, 1, 2, 3]


def test_outside_the_active_range_every_call_is_full():
    options = DeepCacheOptions(4, start=0.3, end=0.8)
    assert full_calls(options, 20) == [0, 1, 2, 3, 4, 5, 9, 13, 16, 17, 18, 19]


def test_a_share_of_an_unknown_whole_reuses_nothing():
    assert full_calls(DeepCacheOptions(4, end=0.5), 6, known=False) == [*range(6)]
    assert full_calls(DeepCacheOptions(4, schedule="nonuniform"), 6, known=False) == [*range(6)]


def test_nonuniform_full_calls_crowd_around_the_centre():
    calls = nonuniform_full_calls(50, 5, 0.3, 1.4)
    assert len(calls) == 10
    assert calls[0] == 0
    gaps = [b - a for a, b in zip(calls, [*calls[1:], 50], strict=True)]
    nearest = min(range(10), key=lambda i: abs(calls[i] + gaps[i] / 2 - 15))
    assert gaps[nearest] < gaps[0]
    assert gaps[nearest] < gaps[-1]
    options = DeepCacheOptions(5, schedule="nonuniform")
    assert full_calls(options, 50) == list(calls)


@given(
    total=st.integers(1, 200),
    interval=st.integers(2, 20),
    centre=st.floats(0, 1),
    power=st.floats(1, 4),
)
def test_nonuniform_has_as_many_full_calls_as_uniform(total, interval, centre, power):
    calls = nonuniform_full_calls(total, interval, centre, power)
    assert len(calls) == -(-total // interval)
    assert calls[0] == 0
    assert all(a < b for a, b in itertools.pairwise(calls))
    assert calls[-1] < total


def test_nonuniform_with_power_one_is_uniform():
    assert nonuniform_full_calls(12, 3, 0.5, 1.0) == (0, 3, 6, 9)
