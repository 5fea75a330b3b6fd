"""The short run: every input that ever failed, then a few dozen new ones for each target."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings

pytest.importorskip("gradio", reason="the page needs gradio, which is not installed")
pytest.importorskip("diffusers", reason="checkpoints need diffusers, which is not installed")

from tests.fuzz.target import Target, keep, kept, read_kept
from tests.fuzz.targets import TARGETS

EXAMPLES = 30
BUDGET_S = 1.0

BY_NAME = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@BY_NAME
def test_what_failed_once(target: Target) -> None:
    for path in kept(target):
        target(read_kept(path))


@BY_NAME
def test_a_few_inputs(target: Target) -> None:
    end = time.monotonic() + BUDGET_S

    # Always the same inputs: new ones are what `python -m tests.fuzz` is for.
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(target.inputs)
    def attempt(value: object) -> None:
        if time.monotonic() < end:
            target(value)

    attempt()


def test_a_planted_fault_is_found_and_kept(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hypothesis import strategies as st

    from tests.fuzz import target as module
    from tests.fuzz.__main__ import find_failure

    monkeypatch.setattr(module, "REGRESSIONS", tmp_path)

    def fails_above(limit: int) -> Target:
        def check(value: int) -> None:
            assert value < limit

        return Target("planted", st.integers(0, 1000), check)

    assert find_failure(fails_above(10**6), examples=50, seed=1) is None
    failure = find_failure(fails_above(77), examples=500, seed=1)
    assert failure is not None
    assert (failure.value, failure.error.split(":")[0]) == (77, "AssertionError")
    path = keep(fails_above(77), failure.value)
    assert read_kept(path) == 77
    assert kept(fails_above(77)) == [path]
    slow = Target("slow", st.just(1), lambda _: time.sleep(0) or sum(range(10**7)), limit_s=0.01)
    assert "s" in find_failure(slow, examples=1, seed=1).error
    large = Target("large", st.just(1), lambda _: bytearray(10**7), limit_bytes=10**6)
    assert "memory" in find_failure(large, examples=1, seed=1).error


def test_bytes_and_odd_texts_are_kept_as_they_are(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hypothesis import strategies as st

    from tests.fuzz import target as module

    monkeypatch.setattr(module, "REGRESSIONS", tmp_path)
    target = Target("odd", st.none(), lambda _: None)
    for value in (b"\0\xff", "\ud800\0\x1b", ["a", None, 1.5, {"b": "\udcff"}]):
        assert read_kept(keep(target, value)) == value
