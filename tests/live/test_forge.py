"""Features of Forge and reForge alone: a built-in ControlNet, models that change within a job."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.live.jobs import STEPS, assert_identical, cached, difference, shallow
from tests.support.webui_client import PROMPT, WebUI, assert_different, assert_same, encode


@pytest.fixture(autouse=True)
def forge_only(webui: WebUI) -> None:
    if webui.host() == "a1111":
        pytest.skip("this WebUI is not Forge or reForge")


@pytest.fixture(scope="module")
def controlled(webui: WebUI, photo: np.ndarray) -> Any:
    """Draws with a ControlNet: `controlled(accelerated, photo, unit fields, **job)`."""
    if not webui.has("/controlnet/model_list"):
        pytest.skip("the WebUI has no ControlNet")
    models = [m for m in webui.get("/controlnet/model_list")["model_list"] if m != "None"]
    if not models:
        pytest.skip("the WebUI has no ControlNet model")

    def draw(accelerated: Any, photo: np.ndarray, unit: dict[str, Any], **job: Any) -> Any:
        unit = {
            "enabled": True,
            "module": "None",
            "model": models[0],
            "image": encode(photo),
        } | unit
        return webui.draw(accelerated, scripts={"ControlNet": {"args": [unit]}}, **job)

    # A host that cannot load a network says so in its log only, and draws without it.
    assert_different(draw(False, photo, {}), webui.draw(False))
    return draw


@pytest.mark.parametrize(
    "unit",
    [{}, {"guidance_start": 0.3, "guidance_end": 0.7}, {"weight": 0.4}],
    ids=["all steps", "some steps", "weaker"],
)
def test_controlnet(webui: WebUI, controlled: Any, photo: np.ndarray, unit: dict[str, Any]) -> None:
    job = {"steps": 5}
    plain = webui.draw(False, **job)
    theirs = controlled(False, photo, unit, **job)
    assert_different(theirs, plain)
    for _ in range(2):
        assert_same(controlled(True, photo, unit, **job), theirs)
    assert webui.status()["running"] == "compiled", webui.status()["line"]
    assert_same(webui.draw(True, **job), plain)


def test_controlnet_with_a_lora(
    controlled: Any, webui: WebUI, photo: np.ndarray, loras: list[str]
) -> None:
    job = {"prompt": f"{PROMPT} <lora:{loras[0]}:1>"}
    theirs = controlled(False, photo, {}, **job)
    assert_different(theirs, controlled(False, photo, {}))
    assert_same(controlled(True, photo, {}, **job), theirs)


def test_controlnet_of_another_size(controlled: Any, photo: np.ndarray) -> None:
    job = {"width": 136, "height": 200, "batch_size": 2}
    assert_same(controlled(True, photo, {}, **job), controlled(False, photo, {}, **job))


@pytest.mark.parametrize(
    "unit", [{}, {"guidance_start": 0.3, "guidance_end": 0.7}], ids=["all steps", "some steps"]
)
def test_controlnet_with_deepcache(
    webui: WebUI, controlled: Any, photo: np.ndarray, unit: dict[str, Any]
) -> None:
    job = {"steps": STEPS, "sampler_name": "DPM++ 2M"}
    elsewhere = {**job, "seed": 4711, "prompt": "a dog on green grass"}
    other = controlled(True, photo, unit, **elsewhere)
    webui.settle()
    plain = controlled(True, photo, unit, **job)
    first = controlled(cached(), photo, unit, **job)
    part, calls = shallow(webui)
    assert calls == STEPS
    assert 0.3 < part / calls < 0.7
    assert_identical(controlled(cached(), photo, unit, **job), first)
    assert 0 < difference(first, plain) < 0.8 * difference(other, plain)


@pytest.mark.parametrize("steps", ["interval:0-0.5", "gate:0.4"])
def test_controlnet_with_guidance_steps(
    webui: WebUI, controlled: Any, photo: np.ndarray, steps: str
) -> None:
    job = {"steps": STEPS, "sampler_name": "DPM++ 2M"}
    guided = {"enabled": True, "preset": "Custom", "guidance_steps": steps}
    for _ in range(2):
        controlled(guided, photo, {}, **job)
        webui.settle()
    other = controlled(True, photo, {}, **{**job, "seed": 4711, "prompt": "a dog on green grass"})
    plain = controlled(True, photo, {}, **job)
    first = controlled(guided, photo, {}, **job)
    said = webui.status()["guidance"]
    what = "Guidance and cross-attention" if steps.startswith("gate") else "Guidance"
    alone = STEPS - (5 if steps.startswith("gate") else 6)
    assert said == f"{what} left out in {alone} of {STEPS} UNet calls"
    assert 0 < difference(first, plain) < difference(other, plain)
    uncontrolled = webui.draw(guided, **job)
    assert difference(first, uncontrolled) > 0
    assert_identical(controlled(guided, photo, {}, **job), first)
    assert_identical(controlled(True, photo, {}, **job), plain)


def test_hires_fix_with_another_checkpoint(webui: WebUI, checkpoints: list[str]) -> None:
    job = {
        "enable_hr": True,
        "hr_scale": 1.5,
        "hr_upscaler": "Latent",
        "hr_second_pass_steps": 2,
        "denoising_strength": 0.6,
        "hr_checkpoint_name": checkpoints[1],
    }
    theirs = webui.draw(False, **job)
    for _ in range(2):
        assert_same(webui.draw(True, **job), theirs)


def test_refiner_whose_weights_go_into_the_same_model(
    webui: WebUI, checkpoints: list[str], request: pytest.FixtureRequest, same: Any
) -> None:
    """Neo's setting: in the middle of sampling, the model keeps its name and its parameters."""
    if webui.option("refiner_fast_sd") is None:
        pytest.skip("this WebUI has no such setting")
    if not webui.option("show_refiner"):
        pytest.skip("the refiner is hidden, so Neo never loads the checkpoint's own weights again")
    plain, _ = same(steps=6)
    request.addfinalizer(lambda: webui.set_options(refiner_fast_sd=False))
    webui.set_options(refiner_fast_sd=True)
    # Neo counts in sigmas.
    job = {"refiner_checkpoint": checkpoints[1], "refiner_switch_at": 3.0}
    refined, _ = same(steps=6, **job)
    assert_different(refined, plain)
    again, _ = same(steps=6)
    assert_same(again, plain)
    same(steps=6, **job, width=136, height=200, batch_size=2)
