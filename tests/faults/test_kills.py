"""Writers killed at named points; `python -m tests.faults.kills --count N` does more of it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from onediff_ext.core import fault_points
from onediff_ext.core.fault_points import reached
from onediff_ext.store import atomic_write, library
from onediff_ext.store.folder import StoreFolder
from tests.faults import kills
from tests.support.systems import needs_fork

pytestmark = needs_fork


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", list(kills.POINTS))
def test_each_point_of_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    for number, point in enumerate(kills.POINTS[kind]):
        monkeypatch.setattr(kills, "POINTS", {kind: (point,)})
        (tmp_path / str(number)).mkdir()
        assert kills.run(3, 7, tmp_path / str(number)) == {f"{kind}: {point}": 3}


@pytest.mark.timeout(300)
def test_random_points(tmp_path: Path) -> None:
    assert sum(kills.run(40, random.randrange(1000), tmp_path).values()) == 40


def test_in_use_nothing_happens_at_a_point() -> None:
    assert fault_points.hook is None
    reached("any")


def written_in_place(folder: StoreFolder, target: Path, chunks: Iterable[bytes]) -> None:
    folder.prepare()
    with target.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            file.flush()
            reached("wrote")


def never_locked(folder: StoreFolder, target: Path, chunks: Iterable[bytes]) -> None:
    folder.prepare()
    part = folder.root / "part"
    atomic_write.write_and_sync(part, chunks)
    os.replace(part, target)


@pytest.mark.parametrize("publish", [written_in_place, never_locked])
def test_the_checks_find_what_is_not_whole_or_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish: object
) -> None:
    monkeypatch.setattr(kills, "POINTS", {"graph": ("wrote",)})
    monkeypatch.setattr(library, "publish", publish)
    with pytest.raises(AssertionError):
        kills.run(20, 1, tmp_path)


def test_the_checks_find_what_is_lost(tmp_path: Path) -> None:
    files = kills.Files(tmp_path)
    files.write("graph", 1, 6)
    files.check({("graph", 1): {6}})
    with pytest.raises(AssertionError):
        files.check({("graph", 1): {7}})  # which was reported as written
