"""The WebUI under test: ONEDIFF_WEBUI_URL is its address, ONEDIFF_WEBUI_ROOT its folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.webui_client import Drawn, WebUI, assert_same


@pytest.fixture(scope="session")
def webui() -> WebUI:
    url, root = os.environ.get("ONEDIFF_WEBUI_URL"), os.environ.get("ONEDIFF_WEBUI_ROOT")
    if not url or not root:
        pytest.skip("ONEDIFF_WEBUI_URL and ONEDIFF_WEBUI_ROOT name no running WebUI")
    webui = WebUI(url, Path(root))
    # Live previews download a model; without a network a picture fails there in reForge.
    webui.set_options(live_previews_enable=False)
    return webui


@pytest.fixture(scope="session")
def checkpoints(webui: WebUI) -> list[str]:
    """Two checkpoints of one architecture; ONEDIFF_WEBUI_CHECKPOINTS names them, or the first."""
    titles = [model["title"] for model in webui.get("/sdapi/v1/sd-models")]
    wanted = os.environ.get("ONEDIFF_WEBUI_CHECKPOINTS", "")
    if wanted:
        names = [name.strip() for name in wanted.split(",")]
        titles = [next(title for title in titles if title.startswith(n)) for n in names]
    if len(titles) < 2:
        pytest.skip("the WebUI has fewer than two checkpoints")
    return titles


# A1111 does not restore an overridden setting that was never set: so all that we override is.
SETTINGS = {
    "sd_checkpoints_limit": 1,
    "samples_save": False,
    "grid_save": False,
    "s_min_uncond": 0.0,
    "token_merging_ratio": 0.0,
}


def keep_one_checkpoint(webui: WebUI, checkpoints: list[str]) -> None:
    """Have a WebUI that kept several checkpoints in memory really load the first one again.

    Among several it only switches: A1111 goes on to tile the layers of the one that it loaded
    last, and reForge lets go of none, and keeps a VAE that was chosen for one of them. A1111 lets
    go of the others once another one is chosen, reForge once one is loaded that it has not kept:
    that of ONEDIFF_WEBUI_INPAINTING.
    """
    webui.set_options(sd_checkpoints_limit=1)
    beginning = os.environ.get("ONEDIFF_WEBUI_INPAINTING", "")
    titles = [str(model["title"]) for model in webui.get("/sdapi/v1/sd-models")]
    third = [title for title in titles if beginning and title.startswith(beginning)]
    for title in (checkpoints[1], *third, checkpoints[0]):
        webui.set_options(sd_model_checkpoint=title)


@pytest.fixture(autouse=True)
def clean_start(webui: WebUI, checkpoints: list[str]) -> None:
    """Each test starts with the first checkpoint, its own VAE, and plain settings."""
    known = webui.get("/sdapi/v1/options")
    if known.get("sd_checkpoints_limit", 1) != 1:
        keep_one_checkpoint(webui, checkpoints)
        known = webui.get("/sdapi/v1/options")
    wanted = {name: value for name, value in SETTINGS.items() if known.get(name) != value}
    first = checkpoints[0].split(" [")[0]
    if not str(known["sd_model_checkpoint"]).startswith(first):
        wanted["sd_model_checkpoint"] = checkpoints[0]
    # Set even if it is the default already: see above.
    webui.set_options(**{**wanted, "s_min_uncond": 0.0, "token_merging_ratio": 0.0})


@pytest.fixture(scope="session")
def loras(webui: WebUI) -> list[str]:
    names = sorted(lora["name"] for lora in webui.get("/sdapi/v1/loras"))
    if len(names) < 2:
        pytest.skip("the WebUI has fewer than two LoRAs")
    return names


@pytest.fixture(scope="session")
def photo() -> np.ndarray:
    """A picture to start from, [128, 128, 3]: soft shapes, no noise."""
    rows, columns = np.mgrid[0:128, 0:128] / 127
    red = np.hypot(rows - 0.5, columns - 0.5) < 0.3
    return (np.stack([0.3 + 0.6 * red, 0.7 * rows, 0.9 - 0.5 * columns], -1) * 255).astype("uint8")


@pytest.fixture(scope="session")
def mask() -> np.ndarray:
    """The right half is drawn again."""
    mask = np.zeros((128, 128, 3), "uint8")
    mask[:, 64:] = 255
    return mask


@pytest.fixture(scope="session", autouse=True)
def graphs(webui: WebUI, checkpoints: list[str], photo: np.ndarray) -> None:
    """The graphs of a plain picture, from the store or built beside the first one."""
    webui.set_options(sd_model_checkpoint=checkpoints[0])
    for _ in range(2):
        webui.draw(True, "img2img", init_images=[photo], denoising_strength=0.6, steps=4)
        webui.settle()


@pytest.fixture
def unchanged(webui: WebUI) -> Iterator[None]:
    """Every attribute of UNet and VAE is after the test what it was before."""
    if not webui.has("/onediff-probe/attributes"):
        pytest.skip("tests/live/probe is not among the WebUI's extensions")
    webui.draw(False, steps=1)  # whatever the host itself does at a first picture
    before = webui.get("/onediff-probe/attributes")
    yield
    after = webui.get("/onediff-probe/attributes")
    assert before["modules"].keys() == after["modules"].keys()
    for name, attributes in before["modules"].items():
        assert after["modules"][name] == attributes, name
    assert after["classes"] == before["classes"]


@pytest.fixture
def unchanged_by_us(webui: WebUI) -> Iterator[None]:
    """UNet and VAE hold nothing of ours after the test."""
    if not webui.has("/onediff-probe/attributes"):
        pytest.skip("tests/live/probe is not among the WebUI's extensions")
    webui.draw(False, steps=1)
    before = webui.get("/onediff-probe/attributes")
    yield
    after = webui.get("/onediff-probe/attributes")
    assert before["modules"].keys() == after["modules"].keys()
    for name, (_, _, _, hooks, owners) in after["modules"].items():
        assert hooks == before["modules"][name][3], name
        assert not any(owner.startswith("onediff_ext") for owner in owners), name
    assert after["classes"] == before["classes"]


@pytest.fixture
def no_rebuild(webui: WebUI) -> Iterator[None]:
    """The test needs no other kinds than a plain picture does."""
    webui.draw(True)
    before = webui.status()
    yield
    webui.draw(True)
    after = webui.status()
    # Another checkpoint counts its own ones, which may not have met an img2img yet.
    assert after["kinds_needed"] <= before["kinds_needed"]
    assert after["waiting"] == 0
    assert after["kinds_failed"] == before["kinds_failed"] == 0


@pytest.fixture
def same(webui: WebUI) -> Callable[..., tuple[Drawn, Drawn]]:
    """Draws a job as the host does and through graphs, and compares.

    Several times through graphs: the first run may meet new kinds, the first run of a kind in
    a process is checked against eager, and what counts then is eager's result. `running` is what
    the status says then.
    """

    def compare(
        path: str = "txt2img", *, backend: str = "", running: str = "compiled", **job: object
    ) -> tuple[Drawn, Drawn]:
        chosen = {"enabled": True, **({"backend": backend} if backend else {})}
        if "init_images" in job:
            # The VAE draws from torch's global generator, which only the picture itself puts into
            # a known state: the first picture with a seed depends on the job before.
            webui.draw(False, path, **job)
        theirs = webui.draw(False, path, **job)
        assert_same(webui.draw(chosen, path, **job), theirs)
        webui.settle()
        assert_same(webui.draw(chosen, path, **job), theirs)
        ours = webui.draw(chosen, path, **job)
        assert_same(ours, theirs)
        status = webui.status()
        assert status["running"] == running, status["line"]
        assert status["kinds_ready"] == status["kinds_needed"], status["line"]
        return ours, theirs

    return compare
