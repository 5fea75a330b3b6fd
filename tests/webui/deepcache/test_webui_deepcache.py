"""DeepCache inside the WebUIs: equal to the engine's own, what it reuses, and why it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onediff_ext.core.deepcache_options import OFF, DeepCacheOptions
from onediff_ext.engine.deepcache.deepcache_forward import DeepCache, deepcache_of
from onediff_ext.hosts.unet_adapters import adapter_for
from tests.support.deepcache_webui_host import MEDIUM, DeepCacheWebUI, Job
from tests.support.sampler_stand_in import CFG, SPLIT, sample


def by_hand(host: DeepCacheWebUI, deepcache: DeepCacheOptions, **how: Any) -> torch.Tensor:
    """The same picture with the engine's DeepCache alone, told of each prediction."""
    cache = DeepCache(host.unet, adapter_for(host.unet))
    cache.install()
    cache.begin_picture(deepcache)
    try:
        return sample(lambda _: cache.begin_evaluation(), host.call, Job(), **how)
    finally:
        cache.remove()


def alternating(number: int) -> Any:
    """s_min_uncond: every other prediction leaves the negative prompt out."""
    return CFG if number % 2 == 0 else [(1, 77)]


LAYOUTS: dict[str, Callable[[int], Any]] = {
    "cfg": lambda _: CFG,
    "split": lambda _: SPLIT,
    "one at a time": lambda _: [(1, 77), (1, 77)],
    "a AND b": lambda _: [(3, 77)],
    "s_min_uncond": alternating,
}


def test_off_touches_nothing(host: DeepCacheWebUI) -> None:
    expected = host.draw(None)
    installed = []

    def look(_: int) -> None:
        installed.append(deepcache_of(host.unet))

    for deepcache in (OFF, DeepCacheOptions.parse("1"), DeepCacheOptions.parse("off")):
        assert torch.equal(host.draw(deepcache, before_call=look), expected)
        assert host.graphs.status().deepcache == ""
    assert set(installed) == {None}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pictures_are_those_of_the_engine(host: DeepCacheWebUI, layout: str) -> None:
    expected = by_hand(host, MEDIUM, layout=LAYOUTS[layout])
    assert torch.equal(host.draw(MEDIUM, layout=LAYOUTS[layout]), expected)
    assert not torch.equal(expected, host.draw(OFF, layout=LAYOUTS[layout]))


def test_the_status_line_says_what_was_reused(host: DeepCacheWebUI) -> None:
    host.draw(MEDIUM)
    assert host.calls == (4, 8)
    assert host.graphs.status().deepcache == "DeepCache: 8 of 12 UNet calls shallow"
    assert "8 of 12 UNet calls shallow" in host.graphs.status().line()
    host.draw(OFF)
    assert host.graphs.status().deepcache == ""


def test_prompt_and_negative_prompt_have_features_of_their_own(host: DeepCacheWebUI) -> None:
    host.draw(MEDIUM, layout=lambda _: SPLIT)
    assert host.calls == (8, 16)
    host.draw(MEDIUM, layout=alternating)
    assert host.calls == (2 * 3, 2 * 3)  # each kind at every second prediction; full after 4


TOP, BOTTOM = slice(0, 8), slice(8, 16)
MOVES: dict[str, Callable[[int], list[slice]]] = {
    "other order": lambda number: [TOP, BOTTOM] if number % 2 else [BOTTOM, TOP],
    "other place": lambda number: [slice(number % 3, number % 3 + 8), BOTTOM],
    "same place": lambda _: [TOP, BOTTOM],
}


@pytest.mark.parametrize("moves", MOVES)
def test_a_tile_never_gets_the_feature_of_another(host: DeepCacheWebUI, moves: str) -> None:
    """Tiles of one shape whose order or place changes from step to step."""
    how = {"tiles": MOVES[moves], "layout": LAYOUTS["cfg"]}
    expected = host.draw(OFF, **how)
    found = host.draw(MEDIUM, **how)
    assert (found - expected).norm() < 1e-4 * expected.norm()
    assert "an extension draws the picture in parts" in host.graphs.status().deepcache
    # The next picture, without tiles, has DeepCache again.
    host.draw(MEDIUM)
    assert host.graphs.status().deepcache == "DeepCache: 8 of 12 UNet calls shallow"


@pytest.mark.parametrize("begins", [0, 5])
@pytest.mark.parametrize("place", ["denoiser", "inner_model", "host"])
def test_an_extension_between_sampler_and_unet_turns_deepcache_off(
    host: DeepCacheWebUI, monkeypatch: pytest.MonkeyPatch, place: str, begins: int
) -> None:
    """Tiled Diffusion may give all tiles to the UNet at once, and move them at each step."""
    tiled: dict[str, Any] = {"__name__": "tiled_diffusion"}
    file = "/webui/extensions/multidiffusion-upscaler/tile_methods/multidiffusion.py"
    exec(compile("def forward(*args, **kwargs): ...", file, "exec"), tiled)
    tiled["forward"] = torch.no_grad()(tiled["forward"])  # as that extension does
    seen = []

    def patch(denoiser: Any) -> None:
        seen.append(denoiser)
        if len(seen) != begins + 1:
            return
        if place == "host" and host.name == "a1111":
            monkeypatch.setattr(host.stand_in.model, "apply_model", tiled["forward"], raising=False)
        elif place == "host":
            options = {"model_function_wrapper": tiled["forward"]}
            monkeypatch.setattr(host.patcher, "model_options", options, raising=False)
        else:
            each = denoiser if place == "denoiser" else denoiser.inner_model
            each.forward = tiled["forward"]

    moving = {"tiles": lambda number: [slice(number % 9, number % 9 + 8)], "patch": patch}
    expected = host.draw(OFF, **moving)
    seen.clear()
    monkeypatch.undo()
    found = host.draw(MEDIUM, **moving)
    said = host.graphs.status().deepcache
    assert "multidiffusion-upscaler calls the UNet in its own way" in said
    if not begins:
        assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("sampler", ["Heun", "DPM2"])
def test_samplers_that_ask_twice_a_step(host: DeepCacheWebUI, sampler: str) -> None:
    host.draw(MEDIUM, sampler=sampler, calls=2)
    assert host.calls == (8, 16)


def test_a_sampler_that_asks_more_often_than_expected(host: DeepCacheWebUI) -> None:
    p = Job()
    host.graphs.begin(p, host.options, deepcache=MEDIUM)
    host.graphs.before_sampling(p)

    def before_step(parameters: Any) -> None:
        parameters.denoiser.total_steps = 6
        host.graphs.before_step(parameters)

    sample(before_step, host.call, p)
    host.graphs.end(p)
    assert host.calls == (4, 8)


def test_image_to_image_at_low_strength(host: DeepCacheWebUI) -> None:
    p = Job()
    p.steps = 30
    host.draw(MEDIUM, p, keep=0.2)
    assert host.calls == (2, 4)


def test_shares_of_the_run(host: DeepCacheWebUI) -> None:
    host.draw(DeepCacheOptions.parse("3 start=0.5"))
    assert host.calls == (6 + 2, 4)


@pytest.mark.parametrize(
    ("sampler", "schedule", "steps", "said"),
    [
        ("LCM", "Automatic", 20, "gains nothing with LCM"),
        ("Euler", "Turbo", 20, "gains nothing with Turbo"),
        ("Euler", "Automatic", 6, "needs 10 steps"),
    ],
)
def test_few_steps_are_refused_with_a_reason(
    host: DeepCacheWebUI, sampler: str, schedule: str, steps: int, said: str
) -> None:
    p = Job()
    p.steps, p.scheduler = steps, schedule
    expected = sample(lambda _: None, host.call, p)
    assert torch.equal(host.draw(MEDIUM, p, sampler=sampler), expected)
    assert said in host.graphs.status().line()
    assert deepcache_of(host.unet) is None


def test_a_distilled_checkpoint_is_refused(host: DeepCacheWebUI) -> None:
    model = host.stand_in.model if host.name == "a1111" else host.stand_in.engine
    model.sd_checkpoint_info.name_for_extra = "dream_lightning_v2"
    host.draw(MEDIUM)
    assert "dream_lightning_v2" in host.graphs.status().deepcache


def test_without_the_unet_there_is_nothing_to_reuse(host: DeepCacheWebUI) -> None:
    p = Job()
    ignored = frozenset({"unet"})
    host.graphs.begin(p, host.options, ignored, deepcache=MEDIUM)
    host.run(p)
    host.graphs.end(p)
    assert "needs the UNet" in host.graphs.status().deepcache


def test_a_unet_of_another_form_says_so(host: DeepCacheWebUI) -> None:
    del host.unet.middle_block
    unet = host.unet
    unet.middle_block = None
    p = Job()
    host.graphs.begin(p, host.options, deepcache=MEDIUM)
    host.graphs.before_sampling(p)
    sample(host.graphs.before_step, lambda x, *_: x, p)
    host.graphs.end(p)
    assert "does not know the blocks" in host.graphs.status().deepcache
