"""LoRAs that a host adds to layers' weights at each call: the blocks run through graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.live.jobs import assert_loras_count
from tests.support.webui_client import PROMPT, WebUI

DTYPE, STREAM = "forge_unet_storage_dtype", "/onediff-probe/stream-layers"


@pytest.fixture(params=["the host's option", "streamed layers", "some streamed layers"])
def at_each_call(
    request: pytest.FixtureRequest, webui: WebUI, checkpoints: list[str]
) -> Iterator[None]:
    """The host merges no LoRA into weights, or not into those that it streams."""
    host = webui.host()
    if host not in ("neo", "reforge"):
        pytest.skip("this WebUI has no such layers")
    if request.param == "the host's option":
        if host != "neo":
            pytest.skip("this WebUI has no such option")
        choose_dtype(webui, checkpoints, "Automatic (fp16 LoRA)")
        yield
        choose_dtype(webui, checkpoints, "Automatic")
        return
    megabytes = 1 if request.param == "streamed layers" else 60
    webui.post(f"{STREAM}?megabytes={megabytes}")
    yield
    webui.post(f"{STREAM}?megabytes=0")


def choose_dtype(webui: WebUI, checkpoints: list[str], dtype: str) -> None:
    """Over the API, Neo reads this option when it loads another checkpoint."""
    webui.set_options(**{DTYPE: dtype})
    for checkpoint in (checkpoints[1], checkpoints[0]):
        webui.set_options(sd_model_checkpoint=checkpoint)


@pytest.mark.usefixtures("at_each_call", "no_rebuild")
def test_loras_that_layers_apply(webui: WebUI, loras: list[str], same: Any) -> None:
    one, two = loras[:2]
    plain, _ = same()
    assert webui.status()["reasons"] == []
    assert webui.get("/onediff-probe/functions") == 0
    full, _ = same(prompt=f"{PROMPT} <lora:{one}:1>")
    assert webui.get("/onediff-probe/functions") > 0
    assert webui.status()["reasons"] == []
    half, _ = same(prompt=f"{PROMPT} <lora:{one}:0.5>")
    both, _ = same(prompt=f"{PROMPT} <lora:{one}:0.7> <lora:{two}:0.6>")
    same(prompt=f"{PROMPT} <lora:{one}:1>", width=136, height=200, batch_size=2)
    assert webui.status()["reasons"] == []
    off, _ = same()
    assert_loras_count(plain, full, half, both, off)
