"""Models that edit a picture, which reaches them beside the latent, by a global of the process.

ONEDIFF_WEBUI_EDITING names their checkpoints. Neo tells them by the names of their files, and gives
them the picture of img2img at a denoising strength of 0.9 and more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.webui_client import WebUI, assert_different, assert_same

_NAMES = [n.strip() for n in os.environ.get("ONEDIFF_WEBUI_EDITING", "").split(",")]

JOB: dict[str, Any] = {"cfg_scale": 1, "sampler_name": "Euler", "scheduler": "Simple"}
REFERENCE = "anima_do_reference"
EDIT: dict[str, Any] = {**JOB, "denoising_strength": 1.0, "steps": 4}


@pytest.fixture(params=_NAMES)
def editing(request: pytest.FixtureRequest, webui: WebUI, checkpoints: list[str]) -> Iterator[str]:
    """The title of a checkpoint that edits pictures, which is the chosen one."""
    titles = [str(model["title"]) for model in webui.get("/sdapi/v1/sd-models")]
    found = [title for title in titles if request.param and title.startswith(request.param)]
    if not found:
        pytest.skip("ONEDIFF_WEBUI_EDITING names no checkpoint")
    webui.set_options(sd_model_checkpoint=found[0])
    yield found[0]
    webui.set_options(sd_model_checkpoint=checkpoints[0])


def test_pictures_to_edit_and_none_afterwards(
    webui: WebUI, editing: str, same: Any, photo: np.ndarray
) -> None:
    """Neo keeps the picture of the last prompt that it has encoded, so that prompts alternate."""
    is_qwen = "qwen" in editing
    same = partial(same, running="compiled in part" if is_qwen else "compiled")
    same(**JOB, prompt="a red apple")
    one, _ = same("img2img", **EDIT, init_images=[photo], prompt="a green apple")
    status, vae = webui.status(), ("Encoder3d", "Decoder3d") if is_qwen else ()
    reasons = [f"no graphs are known for the blocks of {half}" for half in vae]
    assert status["reasons"] == reasons, status["line"]
    same("img2img", **EDIT, init_images=[photo], prompt="an apple", width=136, height=200)
    other, _ = same("img2img", **EDIT, init_images=[255 - photo], prompt="a green apple")
    assert_different(one, other)
    same("img2img", **{**EDIT, "cfg_scale": 4}, init_images=[photo], prompt="two apples")
    same(**JOB, prompt="a blue car")


def test_a_reference_of_anima(
    webui: WebUI,
    checkpoints: list[str],
    same: Any,
    photo: np.ndarray,
    request: pytest.FixtureRequest,
) -> None:
    """By a setting, the picture of img2img is a second frame. That is a kind of its own."""
    titles = [str(model["title"]) for model in webui.get("/sdapi/v1/sd-models")]
    found = [title for title in titles if title.startswith("slim-anima")]
    if not found or webui.option(REFERENCE) is None:
        pytest.skip("the WebUI lacks Anima, or the setting")
    request.addfinalizer(lambda: webui.set_options(sd_model_checkpoint=checkpoints[0]))
    request.addfinalizer(lambda: webui.set_options(**{REFERENCE: False}))
    webui.set_options(sd_model_checkpoint=found[0], **{REFERENCE: False})
    same = partial(same, running="compiled in part")  # the VAE is eager
    job = {**EDIT, "denoising_strength": 0.8, "init_images": [photo]}
    plain, _ = same("img2img", **job)
    before = webui.status()["kinds_needed"]
    webui.set_options(**{REFERENCE: True})
    referring, _ = same("img2img", **job)
    assert_different(referring, plain)
    same("img2img", **{**job, "cfg_scale": 4, "width": 136, "height": 200})
    assert webui.status()["kinds_needed"] == before + 1
    webui.set_options(**{REFERENCE: False})
    again, _ = same("img2img", **job)
    assert_same(again, plain)
