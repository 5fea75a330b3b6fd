"""Guidance in some steps only: pipelines draw what the same done by hand draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from onediff_ext.core.guidance_options import ALL_STEPS, GuidanceOptions
from onediff_ext.engine.deepcache.features import Feature
from onediff_ext.engine.guidance.guided_forward import GuidedForward
from onediff_ext.hosts.diffusers.deepcache import enable_deepcache
from onediff_ext.hosts.diffusers.deepcache_unet import DiffusersUNet
from onediff_ext.hosts.diffusers.guidance_steps import guidance_steps_for
from tests.support import models, transformer_models
from tests.support.deepcache_draws import counts
from tests.support.draw import relative_error

STEPS = 10
_PICTURE = torch.rand(2, 3, 72, 104, generator=torch.Generator().manual_seed(7))
_MASK = (torch.arange(104) < 50).float().expand(1, 1, 72, 104)


def draw(pipe: Any, options: str = "off", *, steps: int = STEPS, **given: Any) -> torch.Tensor:
    """Latents of two pictures, drawn with guidance steps."""
    return draw_and_look(pipe, options, steps=steps, **given)[0]


def draw_and_look(
    pipe: Any, options: str, *, steps: int = STEPS, **given: Any
) -> tuple[torch.Tensor, GuidedForward | None]:
    """`draw`, and what was done."""
    texts: dict[str, Any] = {"prompt": ["a cat", "a red car"], "negative_prompt": ["blurred"] * 2}
    size = {} if "Img2Img" in type(pipe).__name__ else {"height": 72, "width": 104}
    if type(pipe).__name__.startswith("StableDiffusion3"):
        texts, size = dict(transformer_models.sd3_embeddings(7, 2)), {"height": 64, "width": 96}
    given = {**texts, **size, "num_inference_steps": steps, "output_type": "latent", **given}
    given["generator"] = [torch.Generator().manual_seed(n) for n in range(2)]
    torch.manual_seed(1)
    with torch.no_grad(), guidance_steps_for(pipe, GuidanceOptions.parse(options)) as guided:
        latents: torch.Tensor = pipe(**given).images
    return latents, guided


def denoiser(pipe: Any) -> Any:
    return pipe.transformer if getattr(pipe, "unet", None) is None else pipe.unet


def without_guidance_from(step: int) -> dict[str, Any]:
    """Arguments with diffusers' own way to end guidance: it halves what the loop has."""
    names = ["prompt_embeds", "add_text_embeds", "add_time_ids", "pooled_prompt_embeds"]

    def end(pipe: Any, index: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index != step - 1:
            return tensors
        pipe._guidance_scale = 0.0
        return {k: v.chunk(2)[-1] if k in names else v for k, v in tensors.items()}

    return {"callback_on_step_end": end, "names": names}


@pytest.mark.parametrize("model", ["sd15", "sd2", "sdxl", "sd3"])
def test_it_draws_what_diffusers_draws_when_a_callback_ends_guidance(model: str) -> None:
    pipe = transformer_models.sd3() if model == "sd3" else getattr(models, model)()
    callback = without_guidance_from(6)
    names = [n for n in callback.pop("names") if n in type(pipe)._callback_tensor_inputs]
    expected = draw(pipe, callback_on_step_end_tensor_inputs=["latents", *names], **callback)
    found, guided = draw_and_look(pipe, "interval:0-0.6")
    assert torch.equal(found, expected)
    assert guided is not None
    assert guided.counts == {"guidance": 6, "prompt": 4}
    assert relative_error(draw(pipe), expected) > 1e-3  # guidance counts in these steps


def by_hand(
    pipe: Any, denoise: Callable[[int, int, Any, torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The loop of SD1.5 written out; `denoise` predicts for step, index of half, and so on."""
    prompt, negative = pipe.encode_prompt(["a cat", "a red car"], "cpu", 1, True, ["blurred"] * 2)
    pipe.scheduler.set_timesteps(STEPS)
    noise = [torch.randn(1, 4, 9, 13, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    latents = torch.cat(noise) * pipe.scheduler.init_noise_sigma
    for step, t in enumerate(pipe.scheduler.timesteps):
        scaled = pipe.scheduler.scale_model_input(latents, t)
        latents = pipe.scheduler.step(denoise(step, t, scaled, negative, prompt), t, latents)[0]
    return latents


@torch.no_grad()
def test_an_interval_in_the_middle_equals_a_loop_written_out() -> None:
    pipe = models.sd15()

    def denoise(step: int, t: Any, x: Any, negative: Any, prompt: Any) -> torch.Tensor:
        if not 3 <= step < 6:
            return pipe.unet(x, t, prompt).sample
        both = pipe.unet(torch.cat([x, x]), t, torch.cat([negative, prompt])).sample
        return both[:2] + 7.5 * (both[2:] - both[:2])

    assert torch.equal(draw(pipe, "interval:0.3-0.6"), by_hand(pipe, denoise))


@torch.no_grad()
def test_with_deepcache_it_equals_both_written_out() -> None:
    pipe = models.sd15()
    adapter = DiffusersUNet(pipe.unet)
    features = {4: Feature(4), 2: Feature(2)}

    def denoise(step: int, t: Any, x: Any, negative: Any, prompt: Any) -> torch.Tensor:
        is_guided = step < 4
        sample = torch.cat([x, x]) if is_guided else x
        text = torch.cat([negative, prompt]) if is_guided else prompt
        # Every third one, and the first one of the other batch.
        layers = adapter.full if step in (0, 3, 4, 7) else adapter.shallow
        with layers(0, features[sample.shape[0]]):
            both = pipe.unet(sample, t, text).sample
        return both[:2] + 7.5 * (both[2:] - both[:2]) if is_guided else both

    expected = by_hand(pipe, denoise)
    enable_deepcache(pipe, 3)
    found = draw(pipe, "interval:0-0.4")
    assert torch.equal(found, expected)
    assert counts(pipe) == {"full": 4, "shallow": 6}


def overwritten(pipe: Any, guided: range, calls_a_step: int = 1) -> Callable[[], None]:
    """Have a denoiser run whole, with the prompt's prediction in both halves of some steps.

    Returns:
        What ends it.
    """
    calls = iter(range(1000))

    def hook(_: Any, __: Any, output: Any) -> Any:
        if next(calls) // calls_a_step in guided:
            return output
        prompt = output[0].chunk(2)[1]
        return (torch.cat([prompt, prompt]),)

    handle: Any = denoiser(pipe).register_forward_hook(hook)
    end: Callable[[], None] = handle.remove
    return end


def _controlled(cls: Any, model: str) -> Any:
    base = getattr(models, model)()
    net = models.controlnet_for(base.unet)
    parts = {k: v for k, v in base.components.items() if k != "image_encoder"}
    return models.quiet(cls(**parts, controlnet=net, **_no_checker(cls)))


def _no_checker(cls: Any) -> dict[str, Any]:
    return {} if "XL" in cls.__name__ else {"requires_safety_checker": False}


def _adapted(cls: Any = diffusers.StableDiffusionAdapterPipeline, model: str = "sd15") -> Any:
    base = getattr(models, model)()
    is_xl = model == "sdxl"
    with torch.random.fork_rng():
        torch.manual_seed(3)
        adapter = diffusers.T2IAdapter(
            channels=[32, 64, 128, 128] if is_xl else [32, 64],
            num_res_blocks=1,
            downscale_factor=16 if is_xl else 8,
            adapter_type="full_adapter_xl" if is_xl else "full_adapter",
        )
    parts = {k: v for k, v in base.components.items() if k != "image_encoder"}
    return models.quiet(cls(**parts, adapter=adapter, **_no_checker(cls)))


def _with(pipe: Any, scheduler: Any) -> Any:
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    return pipe


def _from(pipe: Any, cls: Any) -> Any:
    return models.quiet(cls.from_pipe(pipe))


_IMAGE = {"image": _PICTURE}
_PART = {"image": _PICTURE, "strength": 0.5}
_CONTROL = {"control_image": _PICTURE, "image": _PICTURE, "strength": 1.0}

# How the pipeline is made, its arguments, its steps, and the calls in one step.
PIPELINES: dict[str, tuple[Callable[[], Any], dict[str, Any], int, int]] = {
    "sd15, image to image": (
        lambda: _from(models.sd15(), diffusers.StableDiffusionImg2ImgPipeline), _PART, 10, 1,
    ),
    "sd15, inpainting": (
        models.sd15_inpaint, {**_IMAGE, "mask_image": _MASK, "strength": 1.0}, 10, 1,
    ),
    "sdxl, image to image": (
        lambda: _from(models.sdxl(), diffusers.StableDiffusionXLImg2ImgPipeline), _PART, 10, 1,
    ),
    "sdxl, refiner": (models.sdxl_refiner, _PART, 10, 1),
    "sdxl, inpainting": (
        models.sdxl_inpaint, {**_IMAGE, "mask_image": _MASK, "strength": 1.0}, 10, 1,
    ),
    "sd15, ControlNet": (
        lambda: _controlled(diffusers.StableDiffusionControlNetPipeline, "sd15"), _IMAGE, 10, 1,
    ),
    "sd15, ControlNet, guess mode": (
        lambda: _controlled(diffusers.StableDiffusionControlNetPipeline, "sd15"),
        {**_IMAGE, "guess_mode": True}, 10, 1,
    ),
    "sd15, ControlNet, image to image": (
        lambda: _controlled(diffusers.StableDiffusionControlNetImg2ImgPipeline, "sd15"),
        _CONTROL, 10, 1,
    ),
    "sdxl, ControlNet": (
        lambda: _controlled(diffusers.StableDiffusionXLControlNetPipeline, "sdxl"), _IMAGE, 10, 1,
    ),
    "sd15, T2I-Adapter": (_adapted, _IMAGE, 10, 1),
    "sd15, Heun": (
        lambda: _with(models.sd15(), diffusers.HeunDiscreteScheduler), {}, 10, 2,
    ),
    "sd15, Heun, image to image": (
        lambda: _with(
            _from(models.sd15(), diffusers.StableDiffusionImg2ImgPipeline),
            diffusers.HeunDiscreteScheduler,
        ),
        _PART, 10, 2,
    ),
    "sdxl, rescaled guidance": (models.sdxl, {"guidance_rescale": 0.7}, 10, 1),
    "sd3, image to image": (
        lambda: transformer_models.sd3(cls=diffusers.StableDiffusion3Img2ImgPipeline),
        {"image": _PICTURE[..., :64, :96], "strength": 0.5}, 10, 1,
    ),
    "sd3, ControlNet": (
        lambda: transformer_models.sd3(
            cls=diffusers.StableDiffusion3ControlNetPipeline,
            controlnet=transformer_models.sd3_controlnet(),
        ),
        {"control_image": _PICTURE[..., :64, :96]}, 10, 1,
    ),
    "sd15, ControlNet, inpainting": (
        lambda: _controlled(diffusers.StableDiffusionControlNetInpaintPipeline, "sd15"),
        {**_CONTROL, "mask_image": _MASK}, 10, 1,
    ),
    "sdxl, ControlNet, image to image": (
        lambda: _controlled(diffusers.StableDiffusionXLControlNetImg2ImgPipeline, "sdxl"),
        _CONTROL, 10, 1,
    ),
    "sdxl, ControlNet, inpainting": (
        lambda: _controlled(diffusers.StableDiffusionXLControlNetInpaintPipeline, "sdxl"),
        {**_CONTROL, "mask_image": _MASK}, 10, 1,
    ),
    "sdxl, T2I-Adapter": (
        lambda: _adapted(diffusers.StableDiffusionXLAdapterPipeline, "sdxl"),
        {"image": _PICTURE[..., :64, :96], "height": 64, "width": 96}, 10, 1,
    ),
    "sd3, inpainting": (
        lambda: transformer_models.sd3(cls=diffusers.StableDiffusion3InpaintPipeline),
        {
            "image": _PICTURE[..., :64, :96], "mask_image": _MASK[..., :64, :96], "strength": 1.0,
        }, 10, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_every_pipeline_draws_what_the_whole_batch_with_overwritten_halves_draws(name: str) -> None:
    make, arguments, steps, calls_a_step = PIPELINES[name]
    pipe = make()
    share = arguments.get("strength", 1)
    run = int(steps * share)
    guided = range(round(0.4 * run))
    end = overwritten(pipe, guided, calls_a_step)
    expected = draw(pipe, steps=steps, **arguments)
    end()
    found, seen = draw_and_look(pipe, "interval:0-0.4", steps=steps, **arguments)
    assert relative_error(found, expected) < 1e-4
    assert seen is not None
    assert seen.reason == ""
    assert seen.counts["guidance"] == len(guided) * calls_a_step
    # Heun's last step is one call.
    assert seen.counts["prompt"] == (run - len(guided)) * calls_a_step - (calls_a_step - 1)
    assert relative_error(draw(pipe, steps=steps, **arguments), expected) > 1e-4


def test_skipped_layers_are_calls_of_their_own() -> None:
    pipe = transformer_models.sd3()
    arguments = {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.0}
    found, seen = draw_and_look(pipe, "interval:0-0.9", **arguments)
    assert seen is not None
    # From 1 % to 20 % of the steps: one of them has a call without layers.
    assert seen.counts == {"guidance": 9, "prompt": 1, "whole": 1}
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("text", ["off", "interval:0-1", "adaptive:1"])
def test_what_leaves_nothing_out_is_bit_equal(text: str) -> None:
    pipe = models.sd15()
    expected = draw(pipe)
    draw(pipe, "interval:0-0.5")
    assert torch.equal(draw(pipe, text), expected)
    assert "forward" not in vars(pipe.unet)


def similarities(pipe: Any) -> list[list[float]]:
    """The cosine similarity of both predictions at each step, for both pictures."""
    found: list[list[float]] = []

    def hook(_: Any, __: Any, output: Any) -> None:
        negative, prompt = output[0].flatten(1).chunk(2)
        found.append(torch.cosine_similarity(negative, prompt).tolist())

    handle = pipe.unet.register_forward_hook(hook)
    draw(pipe)
    handle.remove()
    return found


def ends_at(pipe: Any) -> tuple[float, list[int]]:
    """A similarity that both pictures reach, and the last steps with guidance of each."""
    found = similarities(pipe)
    threshold = max(min(row[n] for row in found[1:5]) for n in range(2))
    return threshold, [
        next(i for i, row in enumerate(found) if row[n] >= threshold) for n in (0, 1)
    ]


@torch.no_grad()
def test_adaptive_guidance_ends_for_each_picture_after_its_predictions_are_alike() -> None:
    pipe = models.sd15()
    threshold, _ = ends_at(pipe)
    ended = [False, False]
    guided_calls = 0

    def denoise(step: int, t: Any, x: Any, negative: Any, prompt: Any) -> torch.Tensor:
        nonlocal guided_calls
        if all(ended):
            return pipe.unet(x, t, prompt).sample
        guided_calls += 1
        both = pipe.unet(torch.cat([x, x]), t, torch.cat([negative, prompt])).sample
        guided = both[:2] + 7.5 * (both[2:] - both[:2])
        for n in range(2):
            if ended[n]:
                guided[n] = both[2 + n]
            alike = torch.cosine_similarity(both[n].flatten(), both[2 + n].flatten(), dim=0)
            ended[n] = ended[n] or float(alike) >= threshold
        return guided

    expected = by_hand(pipe, denoise)
    found, seen = draw_and_look(pipe, f"adaptive:{threshold!r}")
    assert seen is not None
    assert torch.equal(found, expected)
    assert seen.counts == {"guidance": guided_calls, "prompt": STEPS - guided_calls}
    assert 0 < guided_calls < STEPS
    assert torch.equal(draw(pipe, f"adaptive:{threshold!r}"), found)


def test_a_picture_does_not_depend_on_the_others_of_its_batch() -> None:
    pipe = models.sd15()
    threshold, _ = ends_at(pipe)
    both = draw(pipe, f"adaptive:{threshold!r}")
    for number, prompt in enumerate(["a cat", "a red car"]):
        with (
            torch.no_grad(),
            guidance_steps_for(pipe, GuidanceOptions("adaptive", similarity=threshold)),
        ):
            alone = pipe(
                prompt, negative_prompt="blurred", height=72, width=104, output_type="latent",
                num_inference_steps=STEPS, generator=torch.Generator().manual_seed(number),
            ).images  # fmt: skip
        assert relative_error(alone[0], both[number]) < 1e-4


def test_off_changes_nothing() -> None:
    pipe = models.sd15()
    with guidance_steps_for(pipe, ALL_STEPS) as guided:
        assert guided is None
        assert "forward" not in vars(pipe.unet)
