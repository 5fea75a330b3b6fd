"""What WebUIs have built in beside the sampler: tiles, soft masks, schedules, lists of prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.webui_client import PROMPT, WebUI, assert_different, assert_same

TILES, SOFT = "multidiffusion integrated", "soft inpainting"
SCHEDULE = "sd_noise_schedule"


def always_on(webui: WebUI, name: str) -> None:
    if name not in webui.get("/sdapi/v1/scripts")["img2img"]:
        pytest.skip(f"this WebUI has no {name}")


@pytest.mark.parametrize(("method", "batch"), [("MultiDiffusion", 1), ("Mixture of Diffusers", 2)])
def test_tiled_diffusion(
    webui: WebUI, photo: np.ndarray, same: Any, method: str, batch: int
) -> None:
    """The denoiser runs tile by tile; a tile has 256 pixels at least."""
    always_on(webui, TILES)
    wide = np.asarray(Image.fromarray(photo).resize((320, 256)))
    job: dict[str, Any] = {"init_images": [wide], "denoising_strength": 0.6, "steps": 3}
    job |= {"width": 320, "height": 256}
    tiled = {TILES: {"args": [True, method, 256, 256, 64, batch]}}
    ours, _ = same("img2img", scripts=tiled, **job)
    assert_different(ours, webui.draw(False, "img2img", **job))
    same("img2img", **job)


def test_soft_inpainting(webui: WebUI, photo: np.ndarray, mask: np.ndarray, same: Any) -> None:
    always_on(webui, SOFT)
    coarse = Image.fromarray(mask).resize((16, 16))
    soft = np.asarray(coarse.resize((128, 128), Image.Resampling.BICUBIC))
    job: dict[str, Any] = {"init_images": [photo], "mask": soft, "mask_blur": 8}
    job |= {"denoising_strength": 0.8, "steps": 4}
    ours, _ = same("img2img", scripts={SOFT: {"args": [True, 1, 0.5, 4, 0, 0.5, 2]}}, **job)
    assert_different(ours, webui.draw(False, "img2img", **job))


def test_zero_terminal_snr(webui: WebUI, same: Any, request: pytest.FixtureRequest) -> None:
    """A schedule that is rescaled for a picture, and the usual one afterwards."""
    if webui.option(SCHEDULE) is None:
        pytest.skip("this WebUI has no such setting")
    # Not as an overridden setting: the host does not restore one that was never set.
    request.addfinalizer(lambda: webui.set_options(**{SCHEDULE: "Default"}))
    webui.set_options(**{SCHEDULE: "Default"})
    plain, _ = same()
    webui.set_options(**{SCHEDULE: "Zero Terminal SNR"})
    ours, _ = same()
    assert_different(ours, plain)
    webui.set_options(**{SCHEDULE: "Default"})
    again, _ = same()
    assert_same(again, plain)


@pytest.mark.parametrize(
    ("script", "prompt", "arguments"),
    [
        ("prompt matrix", f"{PROMPT}|at night", {}),
        ("prompts from file or textbox", PROMPT, {"List_of_prompt_inputs": f"{PROMPT}\na dog"}),
    ],
)
def test_lists_of_prompts(
    webui: WebUI, same: Any, script: str, prompt: str, arguments: dict[str, str]
) -> None:
    given = webui.script_arguments(script, "txt2img", **arguments)
    ours, _ = same(prompt=prompt, script_name=script, script_args=given)
    assert len(ours.pictures) >= 2
