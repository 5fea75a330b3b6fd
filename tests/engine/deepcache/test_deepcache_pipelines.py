"""DeepCache on diffusers pipelines: sizes, samplers, ControlNet, LoRA, memory, compiled blocks."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    HeunDiscreteScheduler,
    KDPM2DiscreteScheduler,
    LCMScheduler,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionSAGPipeline,
)

from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.core.errors import OptionError
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.hosts.diffusers.deepcache import (
    deepcache_for,
    deepcache_state,
    disable_deepcache,
    enable_deepcache,
)
from tests.support import adapter_weights, models
from tests.support.deepcache_draws import counts, draw, state_of
from tests.support.draw import relative_error

NAMED_SIZES = [(720, 960), (960, 720), (896, 768), (136, 200)]
LAYOUTS = {
    # Real architectures, as narrow as GroupNorm of 32 groups allows, attention where it is
    # cheap enough at a million pixels.
    "sd15": {"widths": (32, 32, 32, 32), "attention": (True, True, True, False), "heads": 1},
    "sd2": {"widths": (32, 32, 32, 32), "attention": (True, True, True, False), "heads": 1},
    "sdxl": {"widths": (32, 32, 32), "attention": (False, True, True), "heads": 1, "depths": 1},
}


def random_sizes(count: int) -> list[tuple[int, int]]:
    """Height and width in pixels, multiples of 8."""
    chooser = random.Random(1)
    sides = range(64, 513, 8)
    return [(chooser.choice(sides), chooser.choice(sides)) for _ in range(count)]


def with_scheduler(pipe: Any, cls: Any) -> Any:
    pipe.scheduler = cls.from_config(pipe.scheduler.config)
    return pipe


class EvaluationLog:
    """Hooks that count a UNet's calls, and note those in which its middle ran."""

    def __init__(self, unet: Any) -> None:
        self.count, self.full = 0, list[int]()
        unet.register_forward_hook(self._called)
        unet.mid_block.register_forward_hook(self._full)

    def _called(self, *call: Any) -> None:
        self.count += 1

    def _full(self, *call: Any) -> None:
        self.full.append(self.count)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_size_runs_without_a_rebuild_after_the_first(layout: str, make_session):
    unet = getattr(models, layout)(**LAYOUTS[layout]).unet
    holder = SimpleNamespace(unet=unet)
    session = make_session()
    compile_pipe(holder, session=session, deepcache="3 depth=1")
    cache = state_of(holder)
    timesteps = torch.tensor([900, 700, 500])
    kinds: list[int] = []
    with torch.no_grad():
        for height, width in [(128, 128), *NAMED_SIZES, *random_sizes(30)]:
            given = models.unet_inputs(unet, 1, height // 8, width // 8)
            timesteps = timesteps.clone()  # a new picture
            for timestep in timesteps:
                noise = unet(**{**given, "timestep": timestep}).sample
                assert noise.shape == given["sample"].shape
                assert torch.isfinite(noise).all()
                # One tensor at the latent's size, and nothing after the last step.
                held = 32 * (height // 8) * (width // 8) * 4
                assert cache.size_bytes == (0 if timestep == 500 else held)
            assert cache.counts == {"full": 1, "shallow": 2}
            kinds.append(len(session.kinds))
    assert len(set(kinds)) == 1
    assert session.fallbacks() == []


def test_compiled_blocks_draw_what_eager_blocks_draw(make_session):
    reference = enable_deepcache(models.one_width("sd15"), "3 depth=1")
    pipe = models.one_width("sd15")
    session = make_session("inductor")
    compile_pipe(pipe, session=session, deepcache="3 depth=1")
    draw(pipe)  # builds
    built = session.count("built") + session.count("loaded")
    for size in ((136, 200), (200, 136), (128, 256)):
        options = {"height": size[0], "width": size[1]}
        assert relative_error(draw(pipe, **options), draw(reference, **options)) < 1e-4
    assert session.count("built") + session.count("loaded") == built
    assert session.fallbacks() == []


@pytest.mark.parametrize(
    ("scheduler", "full", "calls"),
    [
        (EulerAncestralDiscreteScheduler, 4, 12),
        (DPMSolverMultistepScheduler, 4, 12),
        (HeunDiscreteScheduler, 8, 23),
        (KDPM2DiscreteScheduler, 8, 23),
    ],
)
def test_the_cache_follows_calls_not_steps(scheduler: Any, full: int, calls: int):
    pipe = enable_deepcache(with_scheduler(models.sd15(), scheduler), 3)
    log = EvaluationLog(pipe.unet)
    latents = draw(pipe)
    assert torch.isfinite(latents).all()
    assert log.count == calls
    assert counts(pipe) == {"full": full, "shallow": calls - full}
    again = draw(pipe)
    assert counts(pipe) == {"full": full, "shallow": calls - full}
    assert torch.equal(again, latents)


def test_lcm_and_few_steps_are_refused_with_a_reason():
    pipe = models.lcm()
    plain = draw(pipe, steps=4)
    enable_deepcache(pipe, 3)
    assert torch.equal(draw(pipe, steps=4), plain)
    assert "gains nothing" in str(state_of(pipe).reason)
    pipe = enable_deepcache(with_scheduler(models.sd15(), LCMScheduler), 3)
    draw(pipe, steps=12)
    assert counts(pipe) == {"plain": 12}
    pipe = enable_deepcache(models.sd15(), 3)
    draw(pipe, steps=5)
    assert "10 steps" in str(state_of(pipe).reason)
    draw(pipe, steps=12)
    assert state_of(pipe).reason is None
    assert counts(pipe) == {"full": 4, "shallow": 8}


def test_image_to_image_at_low_strength():
    parts = models.sd15().components
    pipe = StableDiffusionImg2ImgPipeline(**parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    enable_deepcache(pipe, 3)
    picture = torch.rand(1, 3, 72, 104, generator=torch.Generator().manual_seed(7))
    assert torch.isfinite(draw(pipe, steps=20, image=picture, strength=0.2)).all()
    assert counts(pipe) == {"full": 2, "shallow": 2}


@pytest.mark.parametrize("channels", [4, 9])
def test_inpainting(channels: int):
    if channels == 9:
        pipe = models.sd15_inpaint()
    else:
        parts = models.sd15().components
        pipe = StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False)
        pipe.set_progress_bar_config(disable=True)
    picture = torch.rand(1, 3, 72, 104, generator=torch.Generator().manual_seed(7))
    mask = torch.zeros(1, 1, 72, 104)
    mask[..., 56:] = 1  # latent cells 7 to 12 are drawn again
    given = {"image": picture, "mask_image": mask, "strength": 0.9, "steps": 20}
    plain = draw(pipe, **given)
    enable_deepcache(pipe, 3)
    found = draw(pipe, **given)
    assert counts(pipe) == {"full": 6, "shallow": 12}
    assert state_of(pipe).size_bytes == 0
    assert torch.isfinite(found).all()
    assert not torch.equal(found[..., 7:], plain[..., 7:])
    if channels == 4:  # the other kind of checkpoint draws the rest as well
        assert torch.equal(found[..., :7], plain[..., :7])
    enable_deepcache(pipe, 1)
    assert torch.equal(draw(pipe, **given), plain)


def test_the_active_range_is_a_share_of_the_picture():
    pipe = enable_deepcache(models.sd15(), "3 start=0.25 end=0.75")
    draw(pipe)
    assert counts(pipe) == {"full": 3 + 2 + 3, "shallow": 4}


def controlled(pipe: Any) -> Any:
    """A pipeline of the same models with a ControlNet."""
    net = models.controlnet_for(pipe.unet)
    made = StableDiffusionControlNetPipeline(
        **pipe.components, controlnet=net, requires_safety_checker=False
    )
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize("depth", [0, 2, 3])
def test_a_controlnet_that_begins_and_ends(depth: int):
    pipe = enable_deepcache(controlled(models.sd15(layers=2)), f"4 depth={depth}")
    hint = torch.rand(1, 3, 72, 104, generator=torch.Generator().manual_seed(7))
    draw(pipe, image=hint)
    assert counts(pipe) == {"full": 3, "shallow": 9}
    draw(pipe, image=hint, control_guidance_start=0.25, control_guidance_end=0.75)
    # In the range from step 3 on, out of it from step 9 on: a full call each.
    assert counts(pipe) == {"full": 4, "shallow": 8}
    assert relative_error(draw(pipe, image=hint), draw(pipe, image=1 - hint)) > 1e-3


def test_control_residuals_reach_only_the_layers_that_run():
    unet = models.sd15(layers=2).unet
    holder = enable_deepcache(SimpleNamespace(unet=unet), "2 depth=3")
    given = models.unet_inputs(unet, 2, 9, 13)
    net = models.controlnet_for(unet)
    with torch.no_grad():
        hint = torch.rand(2, 3, 72, 104, generator=torch.Generator().manual_seed(7))
        down, middle = net(**given, controlnet_cond=hint, return_dict=False)
        inputs = {**given, "mid_block_additional_residual": middle}
        timesteps = torch.tensor([900, 880])

        def shallow_noise(residuals: Any) -> torch.Tensor:
            moments = timesteps.clone()
            unet(**{**inputs, "timestep": moments[0]}, down_block_additional_residuals=down)
            noise: torch.Tensor = unet(
                **{**inputs, "timestep": moments[1]}, down_block_additional_residuals=residuals
            ).sample
            assert state_of(holder).counts["shallow"] == 1
            return noise

        expected = shallow_noise(down)
        deep = (*down[:4], *(100 * r for r in down[4:]))
        assert torch.equal(shallow_noise(deep), expected)
        for i in range(4):
            touched = tuple(100 * r if i == j else r for j, r in enumerate(down))
            assert not torch.equal(shallow_noise(touched), expected)


@pytest.mark.parametrize("layout", ["sd15", "sdxl"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4, 5])
def test_a_t2i_adapters_residuals_reach_their_layers(layout: str, depth: int):
    levels = models.THREE_LEVELS if layout == "sd15" else {}
    unet = getattr(models, layout)(layers=2, **levels).unet
    enable_deepcache(SimpleNamespace(unet=unet), f"2 depth={depth}")
    given = models.unet_inputs(unet, 2, 16, 24)
    widths, scale, shapes = unet.config.block_out_channels, 1, []
    for i, block in enumerate(unet.down_blocks):
        plain = not getattr(block, "has_cross_attention", False)
        if plain and i < len(widths) - 1:
            shapes.append((widths[i], 16 // scale // 2, 24 // scale // 2))
        else:
            shapes.append((widths[i], 16 // scale, 24 // scale))
        scale *= 2 if i < len(widths) - 1 else 1
    generator = torch.Generator().manual_seed(0)
    residuals = [torch.randn(2, *shape, generator=generator) for shape in shapes]
    timesteps = torch.tensor([900, 900])
    with torch.no_grad():
        full, shallow = (
            unet(
                **{**given, "timestep": t},
                down_intrablock_additional_residuals=[r.clone() for r in residuals],
            ).sample
            for t in timesteps
        )
    # The same input twice: the feature is that of this very call, and so is the result.
    torch.testing.assert_close(shallow, full, atol=1e-5, rtol=1e-5)


def test_maps_of_attention_that_a_pipeline_reads_are_computed_at_each_step():
    """Self-attention guidance keeps those of the middle, which shallow calls skip."""
    sag = StableDiffusionSAGPipeline(**models.sd15().components, requires_safety_checker=False)
    sag.set_progress_bar_config(disable=True)
    sag.scheduler = DDIMScheduler.from_config(sag.scheduler.config)
    expected = draw(sag, sag_scale=0.9)
    enable_deepcache(sag, 3)
    assert torch.equal(draw(sag, sag_scale=0.9), expected)
    assert counts(sag).keys() == {"plain"}
    plain = enable_deepcache(models.sd15(), 3)
    draw(plain)
    assert counts(plain)["shallow"] == 8


def test_each_loop_over_one_tensor_of_timesteps_is_a_picture():
    unet = models.sd15().unet
    holder = enable_deepcache(SimpleNamespace(unet=unet), 3)
    timesteps = torch.tensor([900, 800, 700, 600, 500])
    for seed in range(3):
        given = models.unet_inputs(unet, 2, 8, 8, seed=seed)
        with torch.no_grad():
            for timestep in timesteps:
                unet(**{**given, "timestep": timestep})
        assert state_of(holder).counts == {"full": 2, "shallow": 3}


@pytest.mark.parametrize("layout", ["sd15", "sd2", "sdxl"])
def test_every_depth_gives_back_what_it_left_out(layout: str):
    levels = models.THREE_LEVELS if layout == "sd15" else {}
    unet = getattr(models, layout)(layers=2, **levels).unet
    holder = enable_deepcache(SimpleNamespace(unet=unet))
    given = models.unet_inputs(unet, 2, 17, 25)
    cache = state_of(holder)
    with torch.no_grad():
        for depth in range(cache.adapter.max_depth() + 1):
            enable_deepcache(holder, f"2 depth={depth}")
            full, shallow = (
                unet(**{**given, "timestep": t}).sample for t in torch.tensor([900, 900])
            )
            assert cache.counts == {"full": 1, "shallow": 1}
            torch.testing.assert_close(shallow, full, atol=1e-5, rtol=1e-5)


class ChangesLora:
    """Changes the pipeline's LoRA after some steps, as an extension might."""

    def __init__(self, step: int, change: Any) -> None:
        self.step, self.change = step, change

    def __call__(self, pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> Any:
        if step == self.step:
            self.change(pipe)
        return kwargs


@pytest.mark.parametrize(
    "change",
    [
        lambda pipe: pipe.set_adapters("one", 0.2),
        lambda pipe: pipe.disable_lora(),
        lambda pipe: pipe.fuse_lora(),
        lambda pipe: pipe.unload_lora_weights(),
    ],
    ids=["weight", "off", "fused", "unloaded"],
)
def test_a_lora_that_changes_midway_makes_a_full_call(change: Any):
    pipe = models.sd15()
    pipe.load_lora_weights(adapter_weights.lora_tensors(pipe, text=False), adapter_name="one")
    enable_deepcache(pipe, "strong")
    log = EvaluationLog(pipe.unet)
    draw(pipe)
    draw(pipe, callback_on_step_end=ChangesLora(3, change))  # full at 0, 4 and 9, not at 5, 10
    assert counts(pipe) == {"full": 3, "shallow": 9}
    assert log.full == [0, 5, 10, 12 + 0, 12 + 4, 12 + 9]


def test_pictures_of_one_pipeline_do_not_see_each_other():
    pipe = enable_deepcache(models.sd15(), 3)
    first = draw(pipe)
    draw(pipe, height=128, width=128)
    draw(pipe, steps=11)  # ends on a shallow call
    assert torch.equal(draw(pipe), first)


class Stopped(Exception):  # noqa: N818
    """A user stops a picture."""


def test_a_picture_that_was_stopped_leaves_nothing_for_the_next():
    pipe = enable_deepcache(models.sd15(), "strong")
    first = draw(pipe)

    def stop(*call: Any) -> Any:
        if call[1] == 2:
            raise Stopped
        return call[-1]

    with pytest.raises(Stopped):
        draw(pipe, callback_on_step_end=stop)
    assert torch.equal(draw(pipe), first)


@contextmanager
def unchanged(pipe: Any) -> Iterator[None]:
    """Every attribute and child of the pipeline's UNet is the same afterwards."""

    def seen() -> Any:
        return {
            name: (
                dict(vars(m)),
                dict(m._modules),
                list(m._forward_hooks),
                list(m._forward_pre_hooks),
            )
            for name, m in pipe.unet.named_modules()
        }, set(vars(pipe))

    before = seen()
    yield
    assert seen() == before


def test_off_leaves_the_pipeline_as_it_was():
    pipe = controlled(models.sd15())
    hint = torch.rand(1, 3, 72, 104, generator=torch.Generator().manual_seed(7))
    draw(pipe, image=hint, steps=1)  # pipelines keep some of their arguments
    with unchanged(pipe):
        enable_deepcache(pipe, "3 depth=1")
        draw(pipe, image=hint)
        disable_deepcache(pipe)
        disable_deepcache(pipe)
    assert not pipe.controlnet._forward_pre_hooks
    assert deepcache_state(pipe) is None


def test_it_stays_outermost_whatever_is_compiled_when(make_session):
    pipe = models.sd15()
    draw(pipe, steps=1)
    with unchanged(pipe):
        enable_deepcache(pipe, 3)
        compile_pipe(pipe, session=make_session(channels_last=False))
        cache = state_of(pipe)
        assert cache.options == DeepCacheOptions(3)
        compiled = draw(pipe)
        assert counts(pipe) == {"full": 4, "shallow": 8}
        undo_compile(pipe)
        assert state_of(pipe) is cache
        assert compiled_state(pipe) is None
        assert relative_error(draw(pipe), compiled) < 1e-4
        disable_deepcache(pipe)


def test_a_batch_with_its_own_options_gives_the_memory_back():
    pipe = models.sd15()
    plain = draw(pipe)
    with deepcache_for(pipe, DeepCacheOptions(3)):
        draw(pipe)
        seen = counts(pipe)
    assert seen == {"full": 4, "shallow": 8}
    assert torch.equal(draw(pipe), plain)
    gc.collect()
    assert state_of(pipe).size_bytes == 0


def test_a_copied_unet_runs_its_own_forward():
    pipe = enable_deepcache(models.sd15(), 3)
    twin = copy.deepcopy(pipe.unet)
    given = models.unet_inputs(twin, 2, 17, 25)
    with torch.no_grad():
        twin.conv_out.bias.add_(1)
        difference = twin(**given).sample - pipe.unet(**given).sample
    torch.testing.assert_close(difference, torch.ones_like(difference))


def test_timesteps_by_value_are_one_picture_while_they_fall():
    unet = models.sd15().unet
    holder = enable_deepcache(SimpleNamespace(unet=unet), 3)
    given = models.unet_inputs(unet, 1, 8, 8)
    seen = []
    with torch.no_grad():
        for timestep in (900, 800, 700, 600, torch.tensor(500), torch.tensor(400.5), 900, 800):
            unet(**{**given, "timestep": timestep})
            seen.append(dict(state_of(holder).counts))
    assert seen[5] == {"full": 2, "shallow": 4}
    assert seen[7] == {"full": 1, "shallow": 1}


def test_other_models_are_refused():
    with pytest.raises(OptionError, match="no UNet"):
        enable_deepcache(SimpleNamespace(unet=torch.nn.Linear(2, 2)), 3)
    with pytest.raises(OptionError, match="no UNet"):
        enable_deepcache(SimpleNamespace(), 3)
    pipe = models.sd15()
    with pytest.raises(OptionError, match="leaves nothing"):
        enable_deepcache(pipe, "3 depth=40")
    assert deepcache_state(pipe) is None
