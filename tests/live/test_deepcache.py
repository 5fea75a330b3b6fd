"""DeepCache: pictures that are nearly the host's own, whatever the job asks for, and cheaper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.live.jobs import (
    STEPS,
    assert_identical,
    breaking,
    cached,
    difference,
    shallow,
)
from tests.support.webui_client import (
    PROMPT,
    Drawn,
    WebUI,
    WebUIError,
    assert_different,
    assert_same,
)

LONG = "a red apple on a table, " * 20
DEFAULT = "inductor"  # the panel's backend where nobody chooses one


@pytest.fixture(autouse=True)
def nothing_kept(webui: WebUI) -> Any:
    """No feature outlives the pictures of a test, but those at whose place a CUDA graph reads."""
    yield
    if webui.has("/onediff-probe/features"):
        assert webui.get("/onediff-probe/features")["free"] == 0


JOBS: dict[str, dict[str, Any]] = {
    "512x512": {"width": 512, "height": 512, "steps": 10},
    "320x448": {"width": 320, "height": 448},
    "136x200": {"width": 136, "height": 200},
    "batch size 2": {"batch_size": 2},
    "batch count 2": {"n_iter": 2},
    "CFG 1": {"cfg_scale": 1},
    "long prompt, short negative": {"prompt": LONG},
    # At the usual CFG the two together overdrive the demo checkpoint.
    "a AND b": {"prompt": "a red apple AND a blue car :0.7", "cfg_scale": 2.5, "steps": 20},
    "s_min_uncond": {"override_settings": {"s_min_uncond": 2.0}},
    "hires-fix": {
        "enable_hr": True,
        "hr_scale": 1.5,
        "hr_upscaler": "Latent",
        "hr_second_pass_steps": 10,
        "denoising_strength": 0.6,
    },
    "Euler a": {"sampler_name": "Euler a"},
    "Heun": {"sampler_name": "Heun"},
    "DPM2": {"sampler_name": "DPM2"},
    "DPM++ 2M": {"sampler_name": "DPM++ 2M"},
    "DPM++ SDE": {"sampler_name": "DPM++ SDE"},
    "DDIM": {"sampler_name": "DDIM"},
    "UniPC": {"sampler_name": "UniPC"},
    "LMS": {"sampler_name": "LMS"},
    "a text that changes": {"prompt": "a [red:green:6] apple on a table"},
}


def compare(webui: WebUI, path: str = "txt2img", **job: Any) -> tuple[int, int]:
    """Draw with DeepCache, twice, and see that it is nearly the picture without."""
    job = {"steps": STEPS, "sampler_name": "DPM++ 2M", **job}
    other = webui.draw(True, path, **{**job, "seed": 4711, "prompt": "a dog on green grass"})
    webui.settle()  # what is missing is built before anything is compared
    if path == "img2img":
        webui.draw(True, path, **job)  # the VAE's noise depends on the seed of the job before
    plain = webui.draw(True, path, **job)
    needed = webui.status()["kinds_needed"]
    first = webui.draw(cached(), path, **job)
    calls = shallow(webui)
    assert_identical(webui.draw(cached(), path, **job), first)
    assert shallow(webui) == calls
    status = webui.status()
    assert status["running"] == "compiled", status["line"]
    assert (status["kinds_needed"], status["waiting"]) == (needed, 0)
    assert [p.shape for p in first.pictures] == [p.shape for p in plain.pictures]
    assert difference(first, plain) > 0
    # With so few steps a sampler that adds noise at each one drifts furthest.
    assert difference(first, plain) < 0.8 * difference(other, plain)
    return calls


@pytest.mark.parametrize("name", JOBS)
def test_txt2img(webui: WebUI, name: str) -> None:
    part, calls = compare(webui, **JOBS[name])
    assert 0.3 < part / calls < 0.7
    if name in ("Heun", "DPM2", "DPM++ SDE"):
        assert calls >= 2 * STEPS - 1


def test_img2img(webui: WebUI, photo: np.ndarray) -> None:
    compare(webui, "img2img", init_images=[photo], denoising_strength=0.7, steps=20)


def test_img2img_at_low_strength(webui: WebUI, photo: np.ndarray) -> None:
    part, calls = compare(webui, "img2img", init_images=[photo], denoising_strength=0.25, steps=20)
    assert calls < 10
    assert part >= 2


@pytest.mark.parametrize("whole", [True, False], ids=["whole picture", "only masked"])
def test_inpaint(webui: WebUI, photo: np.ndarray, mask: np.ndarray, whole: bool) -> None:
    job = {"init_images": [photo], "mask": mask, "steps": 20, "inpainting_fill": 1}
    compare(webui, "img2img", denoising_strength=0.8, inpaint_full_res=not whole, **job)
    kept = webui.draw(cached(), "img2img", denoising_strength=0.8, mask_blur=0, **job)
    left = np.abs(kept.pictures[0][:, :56].astype(int) - photo[:, :56]).mean()
    right = np.abs(kept.pictures[0][:, 72:].astype(int) - photo[:, 72:]).mean()
    assert left < right


def test_interval_1_is_none(webui: WebUI) -> None:
    webui.draw(True, steps=STEPS)
    plain = webui.draw(True, steps=STEPS)
    assert_identical(webui.draw(cached("1"), steps=STEPS), plain)
    assert webui.status()["deepcache"] == ""


def test_texts_that_alternate_leave_nothing_to_reuse(webui: WebUI) -> None:
    """But for the second prediction, which the hosts still give the first one's text."""
    webui.draw(cached(), steps=STEPS, prompt="a [red|blue] apple on a table")
    assert shallow(webui) in ((0, STEPS), (1, STEPS))


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"steps": STEPS, "sampler_name": "LCM"}, "gains nothing with LCM"),
        ({"steps": 4}, "needs 10 steps"),
    ],
    ids=["LCM", "few steps"],
)
def test_refused_with_a_reason(webui: WebUI, job: dict[str, Any], said: str) -> None:
    webui.draw(True, **job)
    plain = webui.draw(True, **job)
    assert_identical(webui.draw(cached(), **job), plain)
    status = webui.status()
    assert said in status["line"]
    assert status["running"] == "compiled"


def test_levels_and_presets(webui: WebUI) -> None:
    off = webui.draw(True, steps=20)
    drawn = {level: webui.draw(cached(level), steps=20) for level in ("light", "medium", "strong")}
    far = [difference(one, off) for one in drawn.values()]
    assert 0 < far[0] < far[2]
    assert_identical(webui.draw({"deepcache": 5}, steps=20), drawn["strong"])
    # A preset decides the backend too, whatever ONEDIFF_WEBUI_BACKEND says.
    for preset, level in {"Fast": "light", "Maximum": "medium"}.items():
        webui.draw({"preset": preset}, steps=20)
        webui.settle()
        webui.draw({"preset": preset}, steps=20)  # compares what was built
        of_preset = webui.draw({"preset": preset}, steps=20)
        assert_identical(of_preset, webui.draw(cached(level, backend=DEFAULT), steps=20))


def test_a_lora_switched_between_pictures(webui: WebUI, loras: list[str]) -> None:
    job = {"steps": STEPS, "prompt": f"{PROMPT} <lora:{loras[0]}:1>"}
    plain = webui.draw(cached(), steps=STEPS)
    changed = webui.draw(cached(), **job)
    assert_different(changed, plain)
    assert_different(changed, webui.draw(True, **job))
    assert_identical(webui.draw(cached(), steps=STEPS), plain)
    assert_identical(webui.draw(cached(), **job), changed)


@pytest.mark.usefixtures("no_rebuild")
def test_checkpoints_a_b_a(webui: WebUI, checkpoints: list[str]) -> None:
    drawn: dict[str, Drawn] = {}
    # The present one comes second, so that each is loaded for its picture. Forge's schedule is
    # not quite the usual one again after "Zero Terminal SNR", until it loads a checkpoint.
    first, second = checkpoints[:2]
    for title in (second, first, second, first):
        webui.set_options(sd_model_checkpoint=title)
        picture = webui.draw(cached(), steps=STEPS)
        again = drawn.setdefault(title, picture)
        if webui.status()["captures"]:  # one of both may have been compared: it is eager's then
            assert_same(picture, again)
        else:
            assert_identical(picture, again)
    assert_different(*drawn.values())


@pytest.mark.parametrize("in_memory", [1, 2])
def test_refiner(webui: WebUI, checkpoints: list[str], in_memory: int) -> None:
    webui.set_options(sd_checkpoints_limit=in_memory)
    job = {"refiner_checkpoint": checkpoints[1], "refiner_switch_at": 0.5}
    compare(webui, **job)
    refined = webui.draw(cached(), steps=STEPS, **job)
    assert_different(refined, webui.draw(cached(), steps=STEPS))


def test_memory_while_drawing_and_after(webui: WebUI) -> None:
    if not webui.has("/onediff-probe/features"):
        pytest.skip("tests/live/probe is not among the WebUI's extensions")
    before = webui.post("/onediff-probe/watch-features")["all"]  # CUDA graphs hold it
    webui.draw(cached(), steps=12, width=320, height=512)  # a size of this test alone
    found = webui.get("/onediff-probe/features")
    seen = found["most"] - before
    # [2, C, 64, 40] of at least 2 bytes.
    assert seen > 0
    assert seen % (2 * 64 * 40 * 2) == 0
    assert found["free"] == 0


@pytest.mark.usefixtures("unchanged")
def test_a_job_leaves_every_attribute(webui: WebUI) -> None:
    webui.draw(cached(), steps=STEPS)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("forward", [1, 5])
def test_an_exception_leaves_every_attribute(webui: WebUI, forward: int) -> None:
    reference = webui.draw(cached(), steps=STEPS)
    with pytest.raises(WebUIError, match="raised by the probe"):
        webui.draw(cached(), steps=STEPS, scripts=breaking(forward))
    assert_identical(webui.draw(cached(), steps=STEPS), reference)


def test_infotext_pastes_back(webui: WebUI) -> None:
    drawn = webui.draw(cached("3 depth=1"), steps=STEPS)
    entries = drawn.infotexts[0].split(", ")
    assert {"OneDiff preset: Custom", "OneDiff DeepCache: 3 depth=1"} <= set(entries)
    if webui.host() in ("forge", "neo"):
        pytest.skip("this API fails at fields of its own when it is given any infotext")
    # The API fills a job from an infotext, by the same readers as the page's buttons.
    calls = shallow(webui)
    again = webui.draw_plainly("txt2img", {"infotext": drawn.infotexts[0]})
    assert_identical(again, drawn)
    assert shallow(webui) == calls


def test_xyz_plot(webui: WebUI) -> None:
    arguments = webui.script_arguments(
        "x/y/z plot",
        "txt2img",
        X_type="[OneDiff] DeepCache",
        X_values="off, medium, 4",
        Use_text_inputs_instead_of_dropdowns=True,
        Include_Sub_Images=True,
    )
    job = {"script_name": "x/y/z plot", "script_args": arguments, "steps": STEPS}
    plotted = webui.draw(True, **job)
    expected = [
        webui.draw(True, steps=STEPS),
        webui.draw(cached("medium"), steps=STEPS),
        webui.draw(cached("4"), steps=STEPS),
    ]
    for mine, theirs in zip(plotted.pictures[-3:], expected, strict=True):
        assert_identical(Drawn([mine], [], 0), theirs)
