"""The header says one of five things, and never "graphs" while a block runs eager."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from onediff_ext.core.headline import Headline, headline
from onediff_ext.core.status import Status

RUNNING = ("off", "eager", "captured", "compiled", "compiled in part", "another version's word")
BLOCKS = ((0, 0), (0, 28), (12, 28), (28, 28), (30, 28), (-1, 28))


def every_status() -> list[Status]:
    """Every combination of what the headline reads, those that contradict themselves too."""
    combinations = itertools.product(
        RUNNING,
        BLOCKS,
        ((), (("a hook", 16),)),
        (False, True),
        ("", "reading", "exporting", "building", "proving", "kinds", "captures", "measuring"),
        ((0, 16), (16, 16)),
    )
    return [
        Status(
            running,
            kinds_ready=ready,
            kinds_needed=needed,
            building=building,
            stage=stage,
            eager_blocks=eager,
            blocks_compiled=compiled,
            blocks_needed=blocks,
        )
        for running, (compiled, blocks), eager, building, stage, (ready, needed) in combinations
    ]


def test_graphs_only_if_every_block_ran_its_graph() -> None:
    seen: Counter[Headline] = Counter()
    for status, wanted in itertools.product(every_status(), (False, True)):
        shown = headline(status, wanted)
        seen[shown] += 1
        whole = status.blocks_compiled == status.blocks_needed > 0 and not status.eager_blocks
        if shown is Headline.GRAPHS:
            assert whole, status
            assert status.running == "compiled", status
        if shown is Headline.PART:
            assert status.blocks_compiled > 0, status
            assert status.running in ("compiled", "compiled in part"), status
        if status.running in ("off", "eager", "captured"):
            assert shown not in (Headline.GRAPHS, Headline.PART), status
        if shown is Headline.OFF:
            assert not wanted
    assert set(seen) == set(Headline)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (Status(), Headline.WITHOUT),
        (Status("eager", reasons=("fp8",)), Headline.WITHOUT),
        (Status("captured", captures=3), Headline.WITHOUT),
        (Status("eager", 7, 0, 16, building=True), Headline.BUILDING),
        (Status("compiled", stage="measuring", sizes_done=1, sizes_needed=3), Headline.BUILDING),
        (Status("compiled", 16, 0, 16, blocks_compiled=70, blocks_needed=70), Headline.GRAPHS),
        # All kinds have graphs, and the transformer blocks do not use theirs.
        (Status("compiled", 16, 0, 16, blocks_compiled=54, blocks_needed=70), Headline.PART),
        # Nobody has counted the blocks.
        (Status("compiled", 16, 0, 16), Headline.WITHOUT),
    ],
)
def test_each_state(status: Status, expected: Headline) -> None:
    assert headline(status, wanted=True) is expected


def test_unticked_it_is_off_unless_builds_go_on() -> None:
    drawn = Status("compiled", 16, 0, 16, blocks_compiled=70, blocks_needed=70)
    assert headline(drawn, wanted=False) is Headline.OFF
    building = Status("eager", 3, 0, 16, building=True)
    assert headline(building, wanted=False) is Headline.BUILDING
