"""How much a job draws, which tells whether it should wait for graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from onediff_ext.webui.first_picture import work_of

HIRES = {"enable_hr": True, "hr_scale": 2.0, "hr_resize_x": 0, "hr_resize_y": 0}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 10.0),
        ({"n_iter": 3, "batch_size": 2}, 60.0),
        ({"init_images": ["a picture"], "denoising_strength": 0.25}, 2.5),
        ({"denoising_strength": 0.25}, 10.0),
        ({"init_images": ["a picture"], "denoising_strength": None}, 10.0),
        (HIRES, 50.0),
    ],
    ids=["text to image", "pictures", "img2img", "no picture", "no strength", "hires-fix"],
)
def test_work_is_counted_in_steps_of_a_megapixel(more: dict[str, Any], expected: float) -> None:
    job = SimpleNamespace(**{"width": 1000, "height": 500, "steps": 20, **more})
    assert work_of(job) == pytest.approx(expected)
