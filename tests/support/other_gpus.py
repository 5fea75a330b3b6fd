"""Jobs for processes on other GPUs, and their command."""

from __future__ import annotations

import sys
from typing import Any

from PIL import Image

from tests.support.webui_stand_in import StandInJob


def command(way: str) -> list[str]:
    """Starts the stand-in of `host_of_another_gpu` in one of its ways."""
    return [sys.executable, "-m", "tests.support.host_of_another_gpu", way]


def job_of(image: Image.Image, **more: Any) -> Any:
    """The host's processing object of one picture."""
    p: Any = StandInJob(init_images=[image], prompt=["a fox"], seed=[3])
    p.script_args = (0, "balanced", True, 4)
    vars(p).update(more)
    return p
