"""LoRAs, checkpoints and VAEs: each picture is drawn with the weights that it asks for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.live.jobs import assert_loras_count
from tests.support.webui_client import PROMPT, WebUI, assert_different, assert_same


@pytest.mark.usefixtures("no_rebuild")
def test_lora_on_off_other_strength_two_at_once(webui: WebUI, loras: list[str], same: Any) -> None:
    one, two = loras[:2]
    plain, _ = same()
    full, _ = same(prompt=f"{PROMPT} <lora:{one}:1>")
    half, _ = same(prompt=f"{PROMPT} <lora:{one}:0.5>")
    both, _ = same(prompt=f"{PROMPT} <lora:{one}:0.7> <lora:{two}:0.6>")
    off, _ = same()
    assert_loras_count(plain, full, half, both, off)


@pytest.mark.usefixtures("no_rebuild")
def test_lora_that_eager_has_merged_already(webui: WebUI, loras: list[str]) -> None:
    job = {"prompt": f"{PROMPT} <lora:{loras[0]}:1>"}
    theirs = webui.draw(False, **job)
    assert_same(webui.draw(True, **job), theirs)
    plain = webui.draw(False)
    assert_same(webui.draw(True), plain)


@pytest.mark.usefixtures("no_rebuild")
def test_lora_that_only_a_graph_has_merged_is_undone_for_eager(
    webui: WebUI, loras: list[str]
) -> None:
    plain = webui.draw(False)
    webui.draw(True, prompt=f"{PROMPT} <lora:{loras[0]}:1>")
    assert_same(webui.draw(False), plain)


@pytest.mark.parametrize("in_memory", [1, 2])
@pytest.mark.usefixtures("no_rebuild")
def test_checkpoints_a_b_a(webui: WebUI, checkpoints: list[str], in_memory: int) -> None:
    webui.set_options(sd_checkpoints_limit=in_memory)
    first, second = checkpoints[:2]
    references = {}
    for title in (first, second):
        webui.set_options(sd_model_checkpoint=title)
        references[title] = webui.draw(False)
    assert_different(references[first], references[second])
    for title in (first, second, first, second, first):
        webui.set_options(sd_model_checkpoint=title)
        assert_same(webui.draw(True), references[title])


@pytest.mark.usefixtures("no_rebuild")
def test_lora_across_checkpoints(webui: WebUI, checkpoints: list[str], loras: list[str]) -> None:
    job = {"prompt": f"{PROMPT} <lora:{loras[0]}:1>"}
    references = {}
    for title in checkpoints[:2]:
        webui.set_options(sd_model_checkpoint=title)
        references[title] = webui.draw(False, **job)
    for title in checkpoints[1::-1]:
        webui.set_options(sd_model_checkpoint=title)
        assert_same(webui.draw(True, **job), references[title])


@pytest.mark.usefixtures("no_rebuild")
def test_checkpoint_by_override_settings(webui: WebUI, checkpoints: list[str]) -> None:
    first, second = checkpoints[:2]
    job = {
        "override_settings": {"sd_model_checkpoint": second},
        "override_settings_restore_afterwards": True,
    }
    plain = webui.draw(False)
    theirs = webui.draw(False, **job)
    assert_different(plain, theirs)
    assert_same(webui.draw(True, **job), theirs)
    assert_same(webui.draw(True), plain)
    assert str(webui.option("sd_model_checkpoint")).startswith(first.split(" [")[0])


@pytest.mark.parametrize("in_memory", [1, 2])
def test_checkpoint_of_another_architecture(
    webui: WebUI, checkpoints: list[str], in_memory: int, request: pytest.FixtureRequest
) -> None:
    """A small SDXL, that of `tests/support/live_files.py`, by the backend `eager`: its kinds are
    needed nowhere else."""
    titles = [model["title"] for model in webui.get("/sdapi/v1/sd-models")]
    other = next((title for title in titles if title.startswith("tiny-xl")), None)
    if other is None:
        pytest.skip("the WebUI lacks the files of tests/support/live_files.py")
    chosen = {"enabled": True, "preset": "Custom", "backend": "eager"}
    webui.set_options(sd_checkpoints_limit=in_memory)
    # Other previews download a model for SDXL; builds beside pictures can take long.
    settings = {"show_progress_type": "Approx cheap", "onediff_build": "after the first step"}
    before = {name: webui.option(name) for name in settings}
    request.addfinalizer(lambda: webui.set_options(**before))
    webui.set_options(**settings)
    titles = [checkpoints[0], other]
    jobs: tuple[dict[str, Any], ...] = ({}, {"width": 136, "height": 200}, {"batch_size": 2})
    references = {}
    for title in titles:
        webui.set_options(sd_model_checkpoint=title)
        references[title] = [webui.draw(False, **job) for job in jobs]
    assert_different(references[titles[0]][0], references[other][0])
    needed = {}
    for title in (*titles, *titles, titles[0]):
        webui.set_options(sd_model_checkpoint=title)
        for job, reference in zip(jobs, references[title], strict=True):
            assert_same(webui.draw(chosen, **job), reference)
            webui.settle()
        status = webui.status()
        assert status["running"] == "compiled", status["line"]
        # Fewer, when the first one counted the kinds of an img2img before this test.
        assert status["kinds_needed"] <= needed.setdefault(title, status["kinds_needed"])
        assert status["kinds_ready"] == status["kinds_needed"], status["line"]


def test_vae_change(webui: WebUI, checkpoints: list[str], request: pytest.FixtureRequest) -> None:
    def load_again() -> None:
        """A1111 that has kept two checkpoints leaves the other VAE in the model for good."""
        for title in checkpoints[1::-1]:
            webui.set_options(sd_model_checkpoint=title)

    request.addfinalizer(load_again)
    if webui.has("/sdapi/v1/sd-modules"):
        others = webui.get("/sdapi/v1/sd-modules")  # Forge's name for it
        key = "forge_additional_modules"
        values: list[Any] = [[module["filename"]] for module in others]
        neutral: Any = []
    else:
        others = webui.get("/sdapi/v1/sd-vae")
        key, values = "sd_vae", [vae["model_name"] for vae in others]
        neutral = "Automatic"
    if not values:
        pytest.skip("the WebUI has no separate VAE")
    plain = webui.draw(False)
    try:
        webui.set_options(**{key: values[0]})
        theirs = webui.draw(False)
        ours = webui.draw(True)
    finally:
        webui.set_options(**{key: neutral})
    assert (theirs.pictures[0] != plain.pictures[0]).any()
    assert_same(ours, theirs)
    # reForge leaves something else than the checkpoint's own VAE behind.
    assert_same(webui.draw(True), webui.draw(False))
