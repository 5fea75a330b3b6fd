"""Jobs of the page itself: the img2img Batch tab, and page and API mixed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.live.jobs import STEPS, assert_identical, cached, shallow
from tests.live.page import IMG2IMG_BATCH, Page
from tests.support.webui_client import BACKEND, DEFAULTS, Drawn, WebUI, assert_same


@pytest.fixture
def page(webui: WebUI) -> Page:
    return Page(webui)


def on_page(tab: str, accelerated: bool, **more: Any) -> dict[str, Any]:
    """`DEFAULTS` as the page's fields."""
    chosen = {
        f"{tab}_prompt": DEFAULTS["prompt"],
        f"{tab}_neg_prompt": DEFAULTS["negative_prompt"],
        f"{tab}_seed": DEFAULTS["seed"],
        f"{tab}_steps": DEFAULTS["steps"],
        f"{tab}_width": DEFAULTS["width"],
        f"{tab}_height": DEFAULTS["height"],
        f"{tab}_cfg_scale": DEFAULTS["cfg_scale"],
        f"{tab}_sampling": DEFAULTS["sampler_name"],
        f"onediff_{tab}-checkbox": accelerated,
    }
    if BACKEND:
        chosen |= {f"onediff_{tab}_preset": "Custom", f"onediff_{tab}_backend": BACKEND}
    return {**chosen, **more}


def test_txt2img_from_the_page(webui: WebUI, page: Page) -> None:
    reference = webui.draw(False)
    for accelerated in (False, True, True):
        pictures = page.generate("txt2img", on_page("txt2img", accelerated))
        assert_same(Drawn(pictures, [], 0.0), reference)
    assert webui.status()["running"] == "compiled"


def test_infotext_pasted_on_the_page(webui: WebUI, page: Page) -> None:
    drawn = webui.draw(cached("3 depth=1"), steps=STEPS)
    calls = shallow(webui)
    pasted = page.paste("txt2img", drawn.infotexts[0])
    assert pasted["onediff_txt2img_preset"] == "Custom"
    assert pasted["onediff_txt2img_deepcache"] == "3 depth=1"
    assert pasted["txt2img_prompt"] == DEFAULTS["prompt"]
    shown = {name: value for name, value in pasted.items() if name.startswith("onediff_")}
    assert pasted["txt2img_steps"] == STEPS  # as 12.0, which only a browser sends as 12
    fields = on_page("txt2img", True, **{**shown, "txt2img_steps": STEPS})
    pictures = page.generate("txt2img", fields)
    assert_identical(Drawn(pictures, [], 0.0), drawn)
    assert shallow(webui) == calls


def test_page_and_api_mixed(webui: WebUI, page: Page) -> None:
    """Two visitors of the page and one client of the API, with and without graphs."""
    seeds = (1, 2, 3)
    references = {seed: webui.draw(False, seed=seed) for seed in seeds}
    answers: dict[tuple[str, int], Drawn] = {}

    def visitor(name: str, accelerated: bool) -> None:
        own = Page(webui, name)
        for seed in seeds:
            pictures = own.generate("txt2img", on_page("txt2img", accelerated, txt2img_seed=seed))
            answers[name, seed] = Drawn(pictures, [], 0.0)

    def client() -> None:
        for seed in reversed(seeds):
            answers["api", seed] = webui.draw(True, seed=seed)

    threads = [
        threading.Thread(target=visitor, args=("with", True)),
        threading.Thread(target=visitor, args=("without", False)),
        threading.Thread(target=client),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1200)
    assert len(answers) == 3 * len(seeds)
    for (_, seed), drawn in answers.items():
        assert_same(drawn, references[seed])


def test_batch_tab_over_a_folder_of_mixed_sizes(
    webui: WebUI, page: Page, photo: np.ndarray, tmp_path: Path
) -> None:
    webui.set_options(samples_save=True)  # or the tab keeps nothing
    folder = tmp_path / "in"
    folder.mkdir()
    sizes = ((128, 128), (136, 200), (192, 64))
    for number, size in enumerate(sizes):
        Image.fromarray(photo).resize(size).save(folder / f"{number}.png")
    drawn = {}
    # Twice without: the noise of Forge's VAE depends on the job before.
    for accelerated in (False, False, True, True):
        target = tmp_path / f"out-{len(drawn)}"
        fields = on_page(
            "img2img",
            accelerated,
            img2img_batch_input_dir=str(folder),
            img2img_batch_output_dir=str(target),
            img2img_scale=1.0,
            img2img_denoising_strength=0.6,
            img2img_steps=4,
        )
        page.generate("img2img", fields, IMG2IMG_BATCH, hidden={"upload": "from dir"})
        pictures = [np.asarray(Image.open(p).convert("RGB")) for p in sorted(target.glob("*.png"))]
        assert len(pictures) == len(sizes)
        drawn[len(drawn)] = Drawn(pictures, [], 0.0)
    assert webui.status()["running"] == "compiled"
    assert_same(drawn[2], drawn[1])
    assert_same(drawn[3], drawn[1])
