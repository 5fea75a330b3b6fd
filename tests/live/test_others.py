"""Other code that changes layers or takes the UNet over: equal pictures, or eager with a reason.

The files are those of `tests/support/live_files.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.live_files import NETWORKS
from tests.support.webui_client import (
    PROMPT,
    Drawn,
    WebUI,
    WebUIError,
    assert_different,
    assert_same,
    encode,
)

CONTROLNET = "tiny-controlnet"


@pytest.fixture
def eager(webui: WebUI) -> Callable[..., Drawn]:
    """Draws a job with and without OneDiff; it is the same, eager, and the reason is said."""

    def draw(reason: str, path: str = "txt2img", **job: Any) -> Drawn:
        theirs = webui.draw(False, path, **job)
        ours = webui.draw(True, path, **job)
        assert_same(ours, theirs)
        status = webui.status()
        assert status["running"] == "eager", status["line"]
        assert reason in status["line"]
        return ours

    return draw


@pytest.fixture
def plain(webui: WebUI) -> Iterator[Drawn]:
    """A picture without any of it; the same through graphs afterwards, with nothing to explain."""
    drawn = webui.draw(False)
    yield drawn
    assert_same(webui.draw(True), drawn)
    status = webui.status()
    assert status["running"] == "compiled", status["line"]
    assert status["kinds_ready"] == status["kinds_needed"], status["line"]
    assert not status["reasons"], status["reasons"]
    assert_same(webui.draw(False), drawn)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.usefixtures("no_rebuild")
def test_lycoris(webui: WebUI, loras: list[str], plain: Drawn, same: Any, name: str) -> None:
    """On, off, another strength, with a LoRA."""
    network = next((lora for lora in loras if lora.lower().endswith(f"-{name}")), None)
    if network is None:
        pytest.skip(f"the WebUI has no {name} file")
    full, _ = same(prompt=f"{PROMPT} <lora:{network}:1>")
    half, _ = same(prompt=f"{PROMPT} <lora:{network}:0.5>")
    both, _ = same(prompt=f"{PROMPT} <lora:{network}:0.7> <lora:{loras[0]}:0.6>")
    for one, other in ((full, plain), (half, plain), (full, half), (both, full)):
        assert_different(one, other)
    assert_same(webui.draw(True), plain)


@pytest.mark.usefixtures("unchanged")
def test_hypernetwork(webui: WebUI, plain: Drawn, eager: Any) -> None:
    if not webui.has("/sdapi/v1/hypernetworks"):
        pytest.skip("as Neo, this WebUI has no hypernetworks")
    if not any(h["name"] == "tiny-hypernetwork" for h in webui.get("/sdapi/v1/hypernetworks")):
        pytest.skip("the WebUI lacks the files of tests/support/live_files.py")
    job = {"prompt": f"{PROMPT} <hypernet:tiny-hypernetwork:1>"}
    assert_different(eager("a hypernetwork changes the context", **job), plain)
    # The host keeps it loaded until the networks of the next job are activated.
    webui.draw(True, **job)
    assert_same(webui.draw(True), plain)
    assert webui.status()["running"] == "compiled"
    assert not webui.status()["reasons"]


@pytest.mark.usefixtures("unchanged")
def test_lora_by_the_old_method(
    webui: WebUI, loras: list[str], plain: Drawn, eager: Any, same: Any
) -> None:
    """The setting applies LoRAs in each layer's forward."""
    job = {"prompt": f"{PROMPT} <lora:{loras[0]}:1>"}
    if webui.option("lora_functional") is None or (webui.root / "ldm_patched").is_dir():
        pytest.skip("this WebUI has no such setting, or as reForge one that does nothing")
    merged, _ = same(**job)
    try:
        webui.set_options(lora_functional=True)
        assert_different(eager("old method", **job), plain)
        eager("old method")
    finally:
        webui.set_options(lora_functional=False)
    again, _ = same(**job)
    assert_same(again, merged)


CHANGES = {
    "layer": ("", "hook or a replaced forward"),
    "hook": ("", "hook or a replaced forward"),
    "all linears": ("eager", "Linear is patched by"),
    "all blocks": ("eager", "BasicTransformerBlock is patched by"),
    "all feed-forwards": ("eager", "GEGLU is patched by"),
}
"""The probe's change → A1111's own picture with it, without graphs; the reason."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("unchanged")
def test_layers_changed_by_another_extension(webui: WebUI, plain: Drawn, change: str) -> None:
    running, reason = CHANGES[change]
    job = {"scripts": {"OneDiff probe": {"args": [0, change]}}}
    theirs = webui.draw(False, **job)
    assert_different(theirs, plain)
    for _ in range(3):
        assert_same(webui.draw(True, **job), theirs)
        status = webui.status()
        if running and webui.host() == "a1111":
            assert status["running"] == running, status["line"]
        assert any(reason in text for text in status["reasons"]), status["reasons"]


def test_hypertile(webui: WebUI, plain: Drawn) -> None:
    """The built-in extension replaces forwards within transformer blocks, and leaves them there.
    While it is off they pass calls through, and the blocks run through graphs."""
    if not webui.has("/onediff-probe/attributes"):
        pytest.skip("tests/live/probe is not among the WebUI's extensions")
    if "hypertile" not in (name.lower() for name in webui.get("/sdapi/v1/scripts")["txt2img"]):
        pytest.skip("this WebUI has no HyperTile")
    job = {"width": 512, "height": 256, "steps": 2}
    # A1111 does not restore an overridden setting that was never set.
    off, on = ({"override_settings": {"hypertile_enable_unet": wanted}} for wanted in (False, True))
    before = webui.draw(False, **job, **off)
    theirs = webui.draw(False, **job, **on)
    assert (theirs.pictures[0] != before.pictures[0]).any()
    for _ in range(2):
        assert_same(webui.draw(True, **job, **on), theirs)
    assert any("replaced forward" in text for text in webui.status()["reasons"])
    for _ in range(2):
        assert_same(webui.draw(True, **job, **off), before)
    assert not any("replaced forward" in text for text in webui.status()["reasons"])
    webui.post("/onediff-probe/remove-hypertile")


def controlnet(webui: WebUI, photo: np.ndarray, **unit: Any) -> dict[str, Any]:
    """Arguments of one unit; skips where there is no ControlNet that fits."""
    try:
        models = webui.get("/controlnet/model_list?update=true")["model_list"]
    except WebUIError:
        pytest.skip("the WebUI has no ControlNet")
    model = next((name for name in models if name.startswith(CONTROLNET)), None)
    if model is None:
        pytest.skip("the WebUI lacks the files of tests/support/live_files.py")
    image = {"image": encode(photo), "module": "none", "model": model}
    return {"ControlNet": {"args": [{"enabled": True, **image, **unit}]}}


UNITS: dict[str, dict[str, Any]] = {
    "whole": {},
    "weak": {"weight": 0.4},
    "begins late": {"guidance_start": 0.5},
    "ends early": {"guidance_end": 0.4},
    "prompt matters more": {"control_mode": "My prompt is more important"},
}


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.usefixtures("unchanged_by_us")
def test_controlnet(webui: WebUI, photo: np.ndarray, plain: Drawn, same: Any, name: str) -> None:
    """It calls the UNet's blocks, and its network's, from a forward of its own."""
    job = {"scripts": controlnet(webui, photo, **UNITS[name]), "steps": 6}
    without = webui.draw(False, steps=6)
    drawn, _ = same(**job)
    assert not webui.status()["reasons"], webui.status()["reasons"]
    assert_different(drawn, without)
    assert_same(webui.draw(True, steps=6), without)
    assert_same(webui.draw(True), plain)
    assert webui.status()["running"] == "compiled"


@pytest.mark.usefixtures("unchanged_by_us")
def test_controlnet_for_reference(webui: WebUI, photo: np.ndarray, plain: Drawn, same: Any) -> None:
    """Its reference mode replaces transformer blocks' forwards, which therefore run eager."""
    unit = {"module": "reference_only", "model": "None"}
    job = {"scripts": controlnet(webui, photo, **unit), "steps": 6}
    drawn, _ = same(**job)
    assert any("replaced forward" in text for text in webui.status()["reasons"])
    assert_different(drawn, webui.draw(False, steps=6))
    assert_same(webui.draw(True), plain)


def test_controlnet_of_other_sizes(webui: WebUI, photo: np.ndarray, same: Any) -> None:
    """No further kind is needed."""
    job = {"scripts": controlnet(webui, photo)}
    same(**job)
    needed = webui.status()["kinds_needed"]
    for size in ({"width": 136, "height": 200}, {"width": 192, "height": 64, "batch_size": 2}):
        same(**job, **size)
    assert webui.status()["kinds_needed"] == needed


def test_controlnet_with_a_lora(
    webui: WebUI, photo: np.ndarray, loras: list[str], plain: Drawn, same: Any
) -> None:
    lora = {"prompt": f"{PROMPT} <lora:{loras[0]}:1>"}
    scripts = controlnet(webui, photo)
    with_lora, _ = same(**lora)
    both, _ = same(scripts=scripts, **lora)
    alone, _ = same(scripts=scripts)
    for one, other in ((both, with_lora), (both, alone), (both, plain)):
        assert_different(one, other)
    again, _ = same(**lora)
    assert_same(again, with_lora)


def test_controlnet_in_img2img_and_hires_fix(
    webui: WebUI, photo: np.ndarray, plain: Drawn, same: Any
) -> None:
    scripts = controlnet(webui, photo)
    same("img2img", scripts=scripts, init_images=[photo], denoising_strength=0.6, steps=4)
    hires = {"enable_hr": True, "hr_scale": 1.5, "hr_upscaler": "Latent", "denoising_strength": 0.6}
    same(scripts=scripts, **hires)


def test_exception_under_a_controlnet(
    webui: WebUI, photo: np.ndarray, plain: Drawn, same: Any
) -> None:
    scripts = controlnet(webui, photo)
    with pytest.raises(WebUIError, match="raised by the probe"):
        webui.draw(True, scripts={**scripts, "OneDiff probe": {"args": [2]}})
    assert_same(webui.draw(True), plain)
    assert not webui.status()["reasons"]
    same(scripts=scripts)


def test_weights_in_8_bits(webui: WebUI, checkpoints: list[str], plain: Drawn, eager: Any) -> None:
    """The setting "FP8 weight", which Forge and reForge have too and leave unread."""
    if webui.host() != "a1111" or webui.option("fp8_storage") is None:
        pytest.skip("this WebUI has no such setting")
    try:
        webui.set_options(fp8_storage="Enable")
        eager("weights are stored as fp8")
    finally:
        webui.set_options(fp8_storage="Disable")
        # A1111 goes on with weights that it has rounded to 16 bits, until it loads them again.
        for title in reversed(checkpoints[:2]):
            webui.set_options(sd_model_checkpoint=title)
