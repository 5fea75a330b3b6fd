"""Guidance steps: fewer calls with the negative prompt, and nothing else changes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.live.jobs import STEPS, assert_identical, breaking, cached, difference, shallow
from tests.support.webui_client import Drawn, WebUI, WebUIError, assert_different, assert_same

PART = "interval:0-0.5"


def guided(steps: str = PART, **more: Any) -> dict[str, Any]:
    """The always-on script's argument."""
    return {"enabled": True, "preset": "Custom", "guidance_steps": steps, **more}


def left_out(webui: WebUI) -> tuple[int, int]:
    """Calls of the UNet without guidance in the last job, and all of them."""
    said = webui.status()["guidance"]
    match = re.fullmatch(r"Guidance left out in (\d+) of (\d+) UNet calls", said)
    assert match, said
    return int(match[1]), int(match[2])


def compare(webui: WebUI, path: str = "txt2img", **job: Any) -> tuple[int, int]:
    """Draw with guidance in a part of the steps, twice, beside the picture with all of it."""
    job = {"steps": STEPS, "sampler_name": "DPM++ 2M", **job}
    other = webui.draw(True, path, **{**job, "seed": 4711, "prompt": "a dog on green grass"})
    webui.settle()  # what is missing is built before anything is compared
    if path == "img2img":
        webui.draw(True, path, **job)  # the VAE's noise depends on the seed of the job before
    plain = webui.draw(True, path, **job)
    assert webui.status()["guidance"] == ""
    first = webui.draw(guided(), path, **job)
    calls = left_out(webui)
    assert_identical(webui.draw(guided(), path, **job), first)
    assert left_out(webui) == calls
    status = webui.status()
    assert status["running"] == "compiled", status["line"]
    assert [p.shape for p in first.pictures] == [p.shape for p in plain.pictures]
    assert 0 < difference(first, plain) < difference(other, plain)
    assert_identical(webui.draw(True, path, **job), plain)
    return calls


@pytest.mark.parametrize(
    "job",
    [
        pytest.param({}, id="128x128"),
        pytest.param({"width": 320, "height": 448}, id="320x448"),
        pytest.param({"batch_size": 2}, id="batch size 2"),
        pytest.param({"n_iter": 2}, id="batch count 2"),
        pytest.param({"sampler_name": "Euler a"}, id="Euler a"),
        pytest.param({"sampler_name": "Heun"}, id="Heun"),
        pytest.param({"prompt": "a [red:green:6] apple on a table"}, id="a text that changes"),
    ],
)
def test_half_of_the_steps(webui: WebUI, job: dict[str, Any]) -> None:
    alone, calls = compare(webui, **job)
    assert 0.4 <= alone / calls <= 0.6


def test_img2img(webui: WebUI, photo: np.ndarray) -> None:
    job = {"init_images": [photo], "denoising_strength": 0.7, "steps": 20}
    alone, calls = compare(webui, "img2img", **job)
    assert calls < 20
    assert 0.4 <= alone / calls <= 0.6


def test_hires_fix_is_another_pass(webui: WebUI) -> None:
    job = {
        "enable_hr": True,
        "hr_scale": 1.5,
        "hr_upscaler": "Latent",
        "hr_second_pass_steps": 10,
        "denoising_strength": 0.6,
    }
    if webui.host() in ("forge", "neo"):
        job["hr_cfg"] = 7  # a pass of its own has guidance of its own
    alone, calls = compare(webui, **job)
    assert 0.4 <= alone / calls <= 0.6


def test_beside_deepcache(webui: WebUI) -> None:
    job = {"steps": STEPS, "sampler_name": "DPM++ 2M"}
    webui.draw(cached(), **job)
    plain = webui.draw(cached(), **job)
    both = webui.draw(guided(deepcache="medium"), **job)
    assert_identical(webui.draw(guided(deepcache="medium"), **job), both)
    assert difference(both, plain) > 0
    part, calls = shallow(webui)
    assert 0 < part < calls
    alone, of = left_out(webui)
    assert 0.4 <= alone / of <= 0.6


@pytest.mark.parametrize("steps", ["interval:0-1", "off"])
def test_all_steps_are_the_usual_picture(webui: WebUI, steps: str) -> None:
    webui.draw(True, steps=STEPS)
    plain = webui.draw(True, steps=STEPS)
    assert_identical(webui.draw(guided(steps), steps=STEPS), plain)


def test_adaptive_ends_where_both_predict_alike(webui: WebUI) -> None:
    webui.draw(True, steps=STEPS)
    plain = webui.draw(True, steps=STEPS)
    early = webui.draw(guided("adaptive:0.01"), steps=STEPS)
    alone, calls = left_out(webui)
    assert (alone, calls) == (STEPS - 1, STEPS)  # the first step is compared
    assert_different(early, plain)


def plain_and_guided(webui: WebUI, **job: Any) -> tuple[Drawn, Drawn]:
    webui.draw(True, steps=STEPS, **job)
    webui.settle()
    webui.draw(True, steps=STEPS, **job)
    plain = webui.draw(True, steps=STEPS, **job)
    return plain, webui.draw(guided(), steps=STEPS, **job)


def test_without_guidance_there_is_nothing_to_leave_out(webui: WebUI) -> None:
    assert_same(*plain_and_guided(webui, cfg_scale=1))


def test_prompts_with_and_run_whole_with_a_reason(webui: WebUI) -> None:
    job = {"prompt": "a red apple AND a blue car :0.7", "cfg_scale": 2.5}
    assert_same(*plain_and_guided(webui, **job))
    assert "not one prompt and one negative prompt" in webui.status()["guidance"]


@pytest.mark.usefixtures("unchanged")
def test_a_job_leaves_every_attribute(webui: WebUI) -> None:
    webui.draw(guided(), steps=STEPS)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("forward", [1, STEPS - 1])
def test_an_exception_leaves_every_attribute(webui: WebUI, forward: int) -> None:
    reference = webui.draw(guided(), steps=STEPS)
    with pytest.raises(WebUIError, match="raised by the probe"):
        webui.draw(guided(), steps=STEPS, scripts=breaking(forward))
    assert_identical(webui.draw(guided(), steps=STEPS), reference)


@pytest.mark.parametrize("steps", [PART, "adaptive:0.9", "gate:0.4"])
def test_infotext_names_it(webui: WebUI, steps: str) -> None:
    webui.draw(guided(steps), steps=STEPS)  # then there are graphs for blocks after a gate too
    drawn = webui.draw(guided(steps), steps=STEPS)
    assert f'OneDiff guidance steps: "{steps}"' in drawn.infotexts[0].split(", ")
    assert "OneDiff guidance steps" not in webui.draw(True, steps=STEPS).infotexts[0]
    if webui.host() in ("forge", "neo"):
        return  # this API fails at fields of its own when it is given any infotext
    again = webui.draw_plainly("txt2img", {"infotext": drawn.infotexts[0]})
    assert_identical(again, drawn)


def test_xyz_plot(webui: WebUI) -> None:
    arguments = webui.script_arguments(
        "x/y/z plot",
        "txt2img",
        X_type="[OneDiff] Guidance steps",
        X_values=f"off, {PART}",
        Use_text_inputs_instead_of_dropdowns=True,
        Include_Sub_Images=True,
    )
    job = {"script_name": "x/y/z plot", "script_args": arguments, "steps": STEPS}
    plotted = webui.draw(True, **job)
    expected = [webui.draw(True, steps=STEPS), webui.draw(guided(), steps=STEPS)]
    for mine, theirs in zip(plotted.pictures[-2:], expected, strict=True):
        assert_identical(Drawn([mine], [], 0), theirs)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="128x128"),
        pytest.param({"width": 320, "height": 448}, id="320x448"),
        pytest.param({"batch_size": 2, "n_iter": 2}, id="two batches of 2"),
        pytest.param({"sampler_name": "Heun"}, id="Heun"),
    ],
)
def test_a_gate_freezes_cross_attention_for_its_own_picture_alone(
    webui: WebUI, more: dict[str, Any]
) -> None:
    job = {"steps": STEPS, "sampler_name": "DPM++ 2M", **more}
    other = {**job, "prompt": "a dog on green grass", "seed": 4711}
    for _ in range(2):  # what is missing after the gate is known once a picture had one
        webui.draw(guided("gate:0.4"), **job)
        webui.settle()
    unlike = webui.draw(True, **other)
    plain = webui.draw(True, **job)
    first = webui.draw(guided("gate:0.4"), **job)
    said = webui.status()["guidance"]
    match = re.fullmatch(
        r"Guidance and cross-attention left out in (\d+) of (\d+) UNet calls", said
    )
    assert match, said
    assert 0.5 <= int(match[1]) / int(match[2]) <= 0.65
    assert webui.status()["running"] == "compiled", webui.status()["line"]
    interval = webui.draw(guided("interval:0-0.4"), **job)
    assert 0 < difference(first, interval) < difference(unlike, plain)
    assert 0 < difference(first, plain) < difference(unlike, plain)
    after_plain = webui.draw(guided("gate:0.4"), **other)
    assert_identical(webui.draw(guided("gate:0.4"), **job), first)
    assert_identical(webui.draw(guided("gate:0.4"), **other), after_plain)
    assert_identical(webui.draw(True, **job), plain)
    assert_same(plain, webui.draw(False, **job))


def test_a_prompt_that_changes_after_a_gate_has_cross_attention_again(webui: WebUI) -> None:
    job = {"prompt": "a [red:green:9] apple on a table", "steps": STEPS, "sampler_name": "DPM++ 2M"}
    for _ in range(2):
        webui.draw(guided("gate:0.4"), **job)
        webui.settle()
    first = webui.draw(guided("gate:0.4"), **job)
    said = webui.status()["guidance"]
    match = re.fullmatch(
        r"Guidance left out, cross-attention in (\d) calls: the prompt has changed .*", said
    )
    assert match, said
    # The hosts draw ten steps with a text that ends at step 9. The gate's step is the fifth one.
    assert int(match[1]) == 10 - 5
    assert difference(first, webui.draw(guided("interval:0-0.4"), **job)) > 0
    assert_identical(webui.draw(guided("gate:0.4"), **job), first)


def test_a_gate_in_img2img_and_in_a_hires_pass(webui: WebUI, photo: np.ndarray) -> None:
    hires = {"enable_hr": True, "hr_scale": 1.5, "hr_upscaler": "Latent"}
    hires |= {"hr_second_pass_steps": 10, "denoising_strength": 0.6, "steps": STEPS}
    if webui.host() in ("forge", "neo"):
        hires["hr_cfg"] = 7
    for path, job in (
        ("img2img", {"init_images": [photo], "denoising_strength": 0.7, "steps": 20}),
        ("txt2img", hires),
    ):
        for _ in range(2):
            webui.draw(guided("gate:0.5"), path, **job)
            webui.settle()
        first = webui.draw(guided("gate:0.5"), path, **job)
        said = webui.status()["guidance"]
        match = re.fullmatch(
            r"Guidance and cross-attention left out in (\d+) of (\d+) UNet calls", said
        )
        assert match, said
        assert 0.4 <= int(match[1]) / int(match[2]) <= 0.6
        interval = webui.draw(guided("interval:0-0.5"), path, **job)
        assert difference(first, interval) > 0
        webui.draw(guided("gate:0.5"), path, **{**job, "prompt": "a dog on green grass"})
        assert_identical(webui.draw(guided("gate:0.5"), path, **job), first)
