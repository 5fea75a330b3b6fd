"""TAESD in the place of the VAE, and for live previews; random files of `tools/hosts` draw it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.support.webui_client import WebUI, assert_different, assert_same

DECODER, ENCODER, PREVIEWS = "sd_vae_decode_method", "sd_vae_encode_method", "show_progress_type"


@pytest.fixture(autouse=True)
def full_again(webui: WebUI) -> Iterator[None]:
    """The VAE of the checkpoint before and after a test, and no previews."""
    if webui.option(DECODER) is None:
        pytest.skip("this WebUI has no such setting")
    # The host downloads what it does not find.
    if not (webui.root / "models" / "VAE-taesd" / "taesd_decoder.pth").exists():
        pytest.skip("the WebUI lacks the files of tools/hosts/taesd_models.py")
    before = {name: webui.option(name) for name in (PREVIEWS, "show_progress_every_n_steps")}
    plain = {DECODER: "Full", ENCODER: "Full", "live_previews_enable": False, **before}
    webui.set_options(**plain)
    yield
    webui.set_options(**plain)


@pytest.mark.usefixtures("unchanged")
def test_a_picture_decoded_by_taesd_and_by_the_vae_again(webui: WebUI, same: Any) -> None:
    plain, _ = same()
    webui.set_options(**{DECODER: "TAESD"})
    decoded, _ = same()
    assert_different(decoded, plain)
    assert webui.status()["reasons"] == [], webui.status()["line"]
    same(width=136, height=200, batch_size=2)
    webui.set_options(**{DECODER: "Full"})
    again, _ = same()
    assert_same(again, plain)


def test_a_picture_encoded_by_taesd_and_by_the_vae_again(
    webui: WebUI, photo: np.ndarray, mask: np.ndarray, same: Any
) -> None:
    job: dict[str, Any] = {"init_images": [photo], "denoising_strength": 0.6, "steps": 4}
    plain, _ = same("img2img", **job)
    webui.set_options(**{ENCODER: "TAESD"})
    encoded, _ = same("img2img", **job)
    assert_different(encoded, plain)
    same("img2img", mask=mask, **job)
    webui.set_options(**{DECODER: "TAESD"})
    same("img2img", batch_size=2, **job)
    webui.set_options(**{DECODER: "Full", ENCODER: "Full"})
    again, _ = same("img2img", **job)
    assert_same(again, plain)


def test_previews_by_taesd(webui: WebUI, same: Any) -> None:
    """They are computed by another thread, while the denoiser's graphs run."""
    job: dict[str, Any] = {"steps": 20}
    plain, _ = same(**job)
    webui.set_options(
        live_previews_enable=True, **{PREVIEWS: "TAESD", "show_progress_every_n_steps": 1}
    )
    with ThreadPoolExecutor(1) as pool:
        drawn, seen = pool.submit(webui.draw, True, **job), set()
        while not drawn.done():
            seen.add(webui.get("/sdapi/v1/progress")["current_image"])
    assert len(seen - {None}) > 1, "there was no preview"
    assert_same(drawn.result(), plain)
    assert webui.status()["reasons"] == [], webui.status()["line"]
