"""Weights of other kinds: LyCORIS files, checkpoints of another architecture or for inpainting.

Each needs files that not every WebUI under test has: checkpoints named by ONEDIFF_WEBUI_OTHER
(several, by commas) and ONEDIFF_WEBUI_INPAINTING.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.webui_client import WebUI, assert_different, assert_same

COMPILER = "inductor"


def checkpoint_of(webui: WebUI, variable: str, name: str = "") -> str:
    """The title of the checkpoint that an environment variable names by its beginning."""
    name = name or os.environ.get(variable, "")
    titles = [model["title"] for model in webui.get("/sdapi/v1/sd-models")]
    found = [title for title in titles if name and title.startswith(name)]
    if not found:
        pytest.skip(f"{variable} names no checkpoint")
    return str(found[0])


@pytest.mark.parametrize("name", os.environ.get("ONEDIFF_WEBUI_OTHER", "").split(","))
@pytest.mark.usefixtures("no_rebuild")
def test_another_architecture_and_back(
    webui: WebUI, checkpoints: list[str], photo: np.ndarray, same: Any, name: str
) -> None:
    other = checkpoint_of(webui, "ONEDIFF_WEBUI_OTHER", name)
    own = webui.draw(False)
    webui.set_options(sd_model_checkpoint=other)
    drawn, theirs = same()
    assert_different(drawn, own)
    for job in (
        {"width": 136, "height": 200},
        {"batch_size": 2},
        {"cfg_scale": 1},
        {"prompt": "a red apple on a table, " * 20},
        {"prompt": "a red apple AND a blue car :0.7"},
    ):
        same(**job)
    same("img2img", init_images=[photo], denoising_strength=0.6, steps=4)
    webui.set_options(sd_model_checkpoint=checkpoints[0])
    assert_same(webui.draw(True), own)
    assert webui.status()["running"] == "compiled"
    webui.set_options(sd_model_checkpoint=other)
    assert_same(webui.draw(True), theirs)
    status = webui.status()
    assert (status["running"], status["waiting"]) == ("compiled", 0), status["line"]
    webui.set_options(sd_model_checkpoint=checkpoints[0])  # whose kinds are counted


@pytest.fixture
def v_prediction(webui: WebUI) -> Iterator[tuple[str, str]]:
    """Titles of an SDXL checkpoint and of its copy with the keys of v-prediction and zero SNR."""
    if webui.host() != "neo":
        pytest.skip("known of Neo only: the keys of a checkpoint say so")
    plain = checkpoint_of(webui, "ONEDIFF_WEBUI_OTHER", "slim-xl")
    folder = webui.root / "models" / "Stable-diffusion"
    weights = load_file(folder / "slim-xl.safetensors")
    copy = folder / "v-prediction.safetensors"
    save_file({**weights, "v_pred": torch.zeros(1), "ztsnr": torch.zeros(1)}, copy)
    try:
        webui.post("/sdapi/v1/refresh-checkpoints")
        yield plain, checkpoint_of(webui, "ONEDIFF_WEBUI_OTHER", copy.stem)
    finally:
        copy.unlink()
        webui.post("/sdapi/v1/refresh-checkpoints")


def test_v_prediction_with_zero_terminal_snr(
    webui: WebUI, v_prediction: tuple[str, str], checkpoints: list[str], same: Any
) -> None:
    plain, other = v_prediction
    webui.set_options(sd_model_checkpoint=plain)
    without, _ = same()
    webui.set_options(sd_model_checkpoint=other)
    drawn, _ = same()
    assert_different(drawn, without)
    same(width=136, height=200, batch_size=2)
    same(sampler_name="DPM++ 2M", steps=5)
    webui.set_options(sd_model_checkpoint=plain)
    again, _ = same()
    assert_same(again, without)
    webui.set_options(sd_model_checkpoint=checkpoints[0])  # whose kinds are counted


def test_a_checkpoint_for_inpainting_and_back(
    webui: WebUI, checkpoints: list[str], photo: np.ndarray, mask: np.ndarray, same: Any
) -> None:
    """Nine channels go in: the latent, the mask, and the picture without what is masked.

    Graphs are compiled here, whatever ONEDIFF_WEBUI_BACKEND says. The masked part is grey, and so
    is the picture that hosts encode for text to image. The backend "eager" runs torch's GroupNorm
    in NHWC order, which adds equal numbers inexactly on a CPU (4e-4 off at 64x64, where NCHW order
    is 5e-7 off). So a spot check of the VAE's encoder may turn its graph off.
    """
    inpainting = checkpoint_of(webui, "ONEDIFF_WEBUI_INPAINTING")
    webui.set_options(sd_model_checkpoint=inpainting)
    painted = {"init_images": [photo], "mask": mask, "steps": 4, "inpainting_fill": 1}
    whole = {"inpaint_full_res": False, **painted}
    drawn, _ = same("img2img", backend=COMPILER, denoising_strength=0.8, **whole)
    part, _ = same(
        "img2img", backend=COMPILER, denoising_strength=0.8, inpaint_full_res=True, **painted
    )
    assert_different(part, drawn)
    same(backend=COMPILER)  # hosts encode a grey picture for it
    webui.set_options(sd_model_checkpoint=checkpoints[0])
    # Not what it drew before: reForge keeps another VAE until a checkpoint is really loaded.
    same(backend=COMPILER)
    assert webui.status()["running"] == "compiled"
