"""Transformers (DiT) in Forge and Neo; ONEDIFF_WEBUI_TRANSFORMERS names their checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.webui_client import PROMPT, WebUI, assert_different, assert_same

_NAMES = [n.strip() for n in os.environ.get("ONEDIFF_WEBUI_TRANSFORMERS", "").split(",")]

# What the panel says of models that have blocks without graphs, by the checkpoint's beginning.
_VAE = ["no graphs are known for the blocks of Decoder3d"]
_EAGER_PARTS = {
    "slim-qwen-image": ("compiled in part", _VAE),
    "slim-anima": ("compiled in part", _VAE),
}

# SD3 in Forge draws only pictures whose sides are multiples of 16, without graphs too.
_ODD_SIZE, _SD3_SIZE = (136, 200), (144, 208)

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


@pytest.fixture
def same(same: Any, transformer: str) -> Any:
    """As ever, with what the status says of this transformer."""
    return partial(same, running=expected_state(transformer)[0])


def kinds(webui: WebUI) -> int:
    return int(webui.status()["kinds_needed"])


def expected_state(title: str) -> tuple[str, list[str]]:
    """How a checkpoint is drawn, and why some of its blocks have no graphs."""
    found = [state for name, state in _EAGER_PARTS.items() if title.startswith(name)]
    return found[0] if found else ("compiled", [])


def odd_size(title: str) -> tuple[int, int]:
    """A width and a height whose latents fit no large power of two."""
    return _SD3_SIZE if title.startswith("slim-sd3") else _ODD_SIZE


def assert_expected_state(webui: WebUI, title: str) -> None:
    status = webui.status()
    assert (status["running"], status["reasons"]) == expected_state(title), status["line"]
    assert status["waiting"] == 0, status["line"]


def test_any_size_batch_and_prompt_without_a_further_kind(
    webui: WebUI, transformer: str, same: Any
) -> None:
    plain, _ = same(**JOB)
    assert_expected_state(webui, transformer)
    found = kinds(webui)
    width, height = odd_size(transformer)
    for job in (
        {"width": width, "height": height},
        {"width": 160, "height": 96},
        {"width": 256, "height": 64},
        {"batch_size": 2, "width": width, "height": height},
        {"batch_size": 3},
        {"prompt": "a red apple on a table, " * 60},
        {"cfg_scale": 4, "negative_prompt": "blurry, " * 40},
        {"cfg_scale": 4, "prompt": "a red apple AND a blue car :0.7"},
        {"sampler_name": "DPM++ 2M"},
    ):
        drawn, _ = same(**{**JOB, **job})
        if "prompt" in job:
            assert_different(drawn, plain)
        assert_expected_state(webui, transformer)
    assert kinds(webui) == found


def test_sd3_with_the_text_encoder_that_is_off_by_default(
    webui: WebUI, transformer: str, same: Any, request: pytest.FixtureRequest
) -> None:
    if not transformer.startswith("slim-sd3"):
        pytest.skip("its text encoders are always on")
    without, _ = same(**JOB)
    found = kinds(webui)
    request.addfinalizer(lambda: webui.set_options(sd3_enable_t5=False))
    webui.set_options(sd3_enable_t5=True)
    # Forge keeps what it made of the last prompt.
    webui.draw(False, **{**JOB, "steps": 1, "prompt": "another"})
    assert_different(same(**JOB)[0], without)
    same(prompt="a red apple on a table, " * 60, **JOB)
    same(**{**JOB, "cfg_scale": 4, "negative_prompt": "blurry, " * 200})
    assert_expected_state(webui, transformer)
    assert kinds(webui) == found


@pytest.mark.usefixtures("transformer")
def test_img2img_and_inpaint(same: Any, photo: np.ndarray, mask: np.ndarray) -> None:
    pictures = {"init_images": [photo], "denoising_strength": 0.7, "steps": 4, **JOB}
    same("img2img", **pictures)
    same("img2img", batch_size=2, **pictures)
    same("img2img", mask=mask, inpaint_full_res=False, **pictures)
    same("img2img", mask=mask, inpaint_full_res=True, **pictures)


def test_lora_on_off_and_other_strength(
    webui: WebUI, loras: list[str], transformer: str, same: Any
) -> None:
    lora = "random-" + transformer.removeprefix("slim-").split(".")[0].split(" ")[0]
    if lora == "random-chroma":
        lora = "random-flux"  # the same layers
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
    for title, job in ((transformer, JOB), (checkpoints[0], {"running": "compiled"})):
        webui.set_options(sd_model_checkpoint=title)
        _, drawn[title] = same(**job)
    assert_different(*drawn.values())
    for title, job in ((transformer, JOB), (checkpoints[0], {}), (transformer, JOB)):
        webui.set_options(sd_model_checkpoint=title)
        assert_same(webui.draw(True, **job), drawn[title])
        assert_expected_state(webui, title)


def test_all_transformers_in_turn(
    webui: WebUI, checkpoints: list[str], request: pytest.FixtureRequest
) -> None:
    """Some are of one class, with other widths."""
    titles = [str(model["title"]) for model in webui.get("/sdapi/v1/sd-models")]
    found = [title for title in titles if title.startswith(tuple(filter(None, _NAMES)))]
    if len(found) < 2:
        pytest.skip("ONEDIFF_WEBUI_TRANSFORMERS names fewer than two checkpoints")
    request.addfinalizer(lambda: webui.set_options(sd_model_checkpoint=checkpoints[0]))
    drawn = {}
    for title in found:
        webui.set_options(sd_model_checkpoint=title)
        drawn[title] = webui.draw(False, **JOB)
        for _ in range(2):
            webui.draw(True, **JOB)
            webui.settle()
    for title in (*found, *reversed(found)):
        webui.set_options(sd_model_checkpoint=title)
        assert_same(webui.draw(True, **JOB), drawn[title])
        assert_expected_state(webui, title)


@pytest.mark.usefixtures("transformer")
def test_deepcache_is_for_unets(webui: WebUI) -> None:
    theirs = webui.draw(False, **JOB)
    chosen = {"enabled": True, "preset": "Custom", "deepcache": "medium"}
    assert_same(webui.draw(chosen, **JOB), theirs)


@pytest.mark.usefixtures("transformer", "unchanged")
def test_a_job_leaves_every_attribute_as_it_was(webui: WebUI) -> None:
    webui.draw(True, **JOB)
