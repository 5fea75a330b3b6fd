"""Transformers (DiT) in Forge and Neo; ONEDIFF_WEBUI_TRANSFORMERS names their checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.webui_client import PROMPT, WebUI, assert_different, assert_same

_NAMES = [n.strip() for n in os.environ.get("ONEDIFF_WEBUI_TRANSFORMERS", "").split(",")]

# Flux.1-dev takes its guidance as an input; a CFG scale of 1 makes one call a step.
JOB: dict[str, Any] = {"cfg_scale": 1, "sampler_name": "Euler", "scheduler": "Simple"}


@pytest.fixture(params=_NAMES)
def transformer(
    request: pytest.FixtureRequest, webui: WebUI, checkpoints: list[str]
) -> Iterator[str]:
    """The title of a checkpoint that draws with a transformer, which is the chosen one."""
    titles = [str(model["title"]) for model in webui.get("/sdapi/v1/sd-models")]
    found = [title for title in titles if request.param and title.startswith(request.param)]
    if not found:
        pytest.skip("ONEDIFF_WEBUI_TRANSFORMERS names no checkpoint")
    webui.set_options(sd_model_checkpoint=found[0])
    webui.draw(False, **{**JOB, "steps": 1})  # Neo loads a checkpoint only when it draws
    yield found[0]
    webui.set_options(sd_model_checkpoint=checkpoints[0])


def kinds(webui: WebUI) -> int:
    return int(webui.status()["kinds_needed"])


@pytest.mark.usefixtures("transformer")
def test_any_size_batch_and_prompt_without_a_further_kind(webui: WebUI, same: Any) -> None:
    plain, _ = same(**JOB)
    assert webui.status()["reasons"] == [], webui.status()["line"]
    found = kinds(webui)
    for job in (
        {"width": 136, "height": 200},
        {"width": 256, "height": 64},
        {"batch_size": 3},
        {"prompt": "a red apple on a table, " * 60},
        {"cfg_scale": 4, "negative_prompt": "blurry, " * 40},
        {"cfg_scale": 4, "prompt": "a red apple AND a blue car :0.7"},
        {"sampler_name": "DPM++ 2M"},
    ):
        drawn, _ = same(**{**JOB, **job})
        if "prompt" in job:
            assert_different(drawn, plain)
    assert kinds(webui) == found


@pytest.mark.usefixtures("transformer")
def test_img2img_and_inpaint(same: Any, photo: np.ndarray, mask: np.ndarray) -> None:
    pictures = {"init_images": [photo], "denoising_strength": 0.7, "steps": 4, **JOB}
    same("img2img", **pictures)
    same("img2img", mask=mask, inpaint_full_res=False, **pictures)
    same("img2img", mask=mask, inpaint_full_res=True, **pictures)


def test_lora_on_off_and_other_strength(
    webui: WebUI, loras: list[str], transformer: str, same: Any
) -> None:
    lora = "random-klein" if "klein" in transformer else "random-flux"
    if lora not in loras:
        pytest.skip(f"the WebUI has no LoRA {lora}")
    plain, _ = same(**JOB)
    found = kinds(webui)
    full, _ = same(prompt=f"{PROMPT} <lora:{lora}:1>", **JOB)
    half, _ = same(prompt=f"{PROMPT} <lora:{lora}:0.5>", **JOB)
    off, _ = same(**JOB)
    assert_different(full, plain)
    assert_different(half, plain)
    assert_different(full, half)
    assert_same(off, plain)
    assert kinds(webui) == found


def test_unet_and_transformer_in_turn(
    webui: WebUI, checkpoints: list[str], transformer: str, same: Any
) -> None:
    drawn = {}
    for title, job in ((transformer, JOB), (checkpoints[0], {})):
        webui.set_options(sd_model_checkpoint=title)
        _, drawn[title] = same(**job)
    assert_different(*drawn.values())
    for title, job in ((transformer, JOB), (checkpoints[0], {}), (transformer, JOB)):
        webui.set_options(sd_model_checkpoint=title)
        assert_same(webui.draw(True, **job), drawn[title])
        status = webui.status()
        assert (status["running"], status["waiting"]) == ("compiled", 0), status["line"]


@pytest.mark.usefixtures("transformer")
def test_deepcache_is_for_unets(webui: WebUI) -> None:
    theirs = webui.draw(False, **JOB)
    chosen = {"enabled": True, "preset": "Custom", "deepcache": "medium"}
    assert_same(webui.draw(chosen, **JOB), theirs)


@pytest.mark.usefixtures("transformer", "unchanged")
def test_a_job_leaves_every_attribute_as_it_was(webui: WebUI) -> None:
    webui.draw(True, **JOB)
