"""Arguments of jobs with the probe and with DeepCache, and what is read from their answers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.support.webui_client import Drawn, WebUI, assert_different, assert_same

STEPS = 12


def breaking(forward: int) -> dict[str, Any]:
    """The argument that has the probe raise in one forward of the UNet."""
    return {"OneDiff probe": {"args": [forward]}}


def cached(level: str = "medium", **more: Any) -> dict[str, Any]:
    """The always-on script's argument."""
    return {"enabled": True, "preset": "Custom", "deepcache": level, **more}


def shallow(webui: WebUI) -> tuple[int, int]:
    """Shallow calls of the UNet in the last job, and all of them, as the status line has it."""
    said = webui.status()["deepcache"]
    match = re.search(r"(\d+) of (\d+) UNet calls shallow", said)
    assert match, said
    return int(match[1]), int(match[2])


def difference(one: Drawn, other: Drawn) -> float:
    """Mean absolute one, of 255."""
    return float(np.abs(one.pictures[0].astype(int) - other.pictures[0]).mean())


def assert_identical(one: Drawn, other: Drawn) -> None:
    assert len(one.pictures) == len(other.pictures) > 0
    for mine, theirs in zip(one.pictures, other.pictures, strict=True):
        assert mine.std() > 5, "nothing was drawn"
        assert (mine == theirs).all()


def assert_loras_count(plain: Drawn, full: Drawn, half: Drawn, both: Drawn, off: Drawn) -> None:
    """A LoRA at 1, the same at one half, and two LoRAs differ; without any it is `plain` again."""
    for changed in (full, half, both):
        assert_different(changed, plain)
    assert_different(full, half)
    assert_different(full, both)
    assert_same(off, plain)
