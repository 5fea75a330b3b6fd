"""The ways in which a picture is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.hosts.diffusers.guidance_steps import guidance_steps_for
from tests.support.models import unet_inputs
from tests.support.transformer_models import LATENT_CHANNELS

if TYPE_CHECKING:
    from tests.differential.world import World


def draw(world: World, pipe: Any) -> torch.Tensor:
    """Latents of the world's picture, drawn by one of its pipelines."""
    return WAYS[world.picture.way](world, pipe)


def _options(world: World) -> dict[str, Any]:
    picture = world.picture
    prompts = dict(picture.prompts)
    if "callback_on_step_end" in picture.extra:  # it may write them
        prompts = tree_map(_copied, prompts)
    if picture.guidance <= 1:
        prompts = {k: v for k, v in prompts.items() if not k.startswith("negative")}
    options = {
        **prompts,
        "num_inference_steps": picture.steps,
        "guidance_scale": picture.guidance,
        "num_images_per_prompt": picture.batch,
        "output_type": "latent",
        "generator": torch.Generator(world.device).manual_seed(picture.noise),
    }
    if world.model == "qwen_image":
        options["true_cfg_scale"] = options.pop("guidance_scale")
    if picture.lora_scale is not None:
        options[LORA_SCALE_IN[world.model]] = {"scale": picture.lora_scale}
    for name, value in picture.extra.items():
        options[name] = value(world) if callable(value) else value
    return options


def _pipe(world: World, pipe: Any) -> torch.Tensor:
    picture = world.picture
    return pipe(height=picture.height, width=picture.width, **_options(world)).images


def _guided_in_some_steps(world: World, pipe: Any) -> torch.Tensor:
    """With guidance in the first half of the steps, so the batch is halved within the picture.

    UNets have a gate there where the number of steps is even.
    """
    has_gate = world.is_unet and world.picture.steps % 2 == 0
    steps = "gate:0.5" if has_gate else "interval:0-0.5"
    with guidance_steps_for(pipe, GuidanceOptions.parse(steps)):
        return _pipe(world, pipe)


def _from_pipe(world: World, pipe: Any) -> torch.Tensor:
    """Image to image, by another pipeline of the same parts."""
    from diffusers import (
        FluxImg2ImgPipeline,
        StableDiffusion3Img2ImgPipeline,
        StableDiffusionImg2ImgPipeline,
        StableDiffusionXLImg2ImgPipeline,
    )

    cls = {
        "sd15": StableDiffusionImg2ImgPipeline,
        "sdxl": StableDiffusionXLImg2ImgPipeline,
        "sd3": StableDiffusion3Img2ImgPipeline,
        "flux": FluxImg2ImgPipeline,
    }[world.model]
    parts = {**pipe.components}
    other = cls(**parts, **EXTRA.get(world.model, {}))
    other.set_progress_bar_config(disable=True)
    picture = world.picture
    generator = torch.Generator().manual_seed(picture.noise)
    channels = 4 if world.is_unet else LATENT_CHANNELS
    latent = torch.randn(1, channels, picture.height // 8, picture.width // 8, generator=generator)
    options = _options(world)
    if not world.is_unet:
        options.update(height=picture.height, width=picture.width)
    return other(image=latent.to(world.device, world.dtype), strength=1.0, **options).images


def _inputs(world: World, pipe: Any, noise: int | None = None) -> dict[str, Any]:
    picture = world.picture
    inputs = unet_inputs(
        pipe.unet,
        picture.batch + 1,
        picture.height // 8,
        picture.width // 8,
        picture.tokens,
        picture.noise if noise is None else noise,
        world.device,
    )
    if picture.lora_scale is not None:
        inputs["cross_attention_kwargs"] = {"scale": picture.lora_scale}
    return inputs


def _steps(world: World, pipe: Any, inputs: dict[str, Any], **more: Any) -> torch.Tensor:
    """The UNet alone, called as a sampler of one's own would."""
    for i in range(world.picture.steps):
        timestep = torch.tensor(900.0 - 100 * i, device=world.device)
        inputs = {**inputs, "timestep": timestep}
        inputs["sample"] = pipe.unet(**inputs, **more).sample
    return inputs["sample"]


def _unet(world: World, pipe: Any) -> torch.Tensor:
    return _steps(world, pipe, _inputs(world, pipe))


def _plain_timestep(world: World, pipe: Any) -> torch.Tensor:
    inputs = _inputs(world, pipe)
    sample = inputs["sample"]
    for i in range(world.picture.steps):
        inputs = {**inputs, "sample": sample, "timestep": 900 - 100 * i}
        (sample,) = pipe.unet(**inputs, return_dict=False)
    return sample


def _outputs_kept(world: World, pipe: Any) -> torch.Tensor:
    """Earlier outputs are used later, as samplers of higher order do."""
    inputs = _inputs(world, pipe)
    outputs = []
    for i in range(world.picture.steps + 1):
        timestep = torch.tensor(900.0 - 100 * i, device=world.device)
        outputs.append(pipe.unet(**{**inputs, "timestep": timestep}).sample)
    return torch.cat(outputs)


def _two_streams(world: World, pipe: Any) -> torch.Tensor:
    """Two callers take turns, each on a GPU stream of its own, and neither waits for the other."""
    device, on_gpu = world.device, world.on_gpu
    callers = [
        (torch.cuda.Stream(device) if on_gpu else None, _inputs(world, pipe, noise))
        for noise in (world.picture.noise, world.picture.noise + 1)
    ]
    times = [torch.tensor(900.0 - 100 * i, device=device) for i in range(world.picture.steps + 1)]
    outputs = []
    for stream, _ in callers:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
    for timestep in times:
        for stream, inputs in callers:
            with torch.cuda.stream(stream):  # type: ignore[arg-type]  # None changes nothing
                outputs.append(pipe.unet(**{**inputs, "timestep": timestep}).sample)
    for stream, _ in callers:
        if stream is not None:
            torch.cuda.current_stream(device).wait_stream(stream)
    return torch.cat(outputs)


def _prompt_written(world: World, pipe: Any) -> torch.Tensor:
    """The prompt's tensor is written in place between two steps."""
    inputs = _inputs(world, pipe)
    for i in range(world.picture.steps):
        inputs["sample"] = pipe.unet(**inputs).sample
        inputs["encoder_hidden_states"].mul_(0.9 - 0.1 * i)
    return inputs["sample"]


def _mask(world: World, pipe: Any) -> torch.Tensor:
    inputs = _inputs(world, pipe)
    mask = torch.ones(inputs["sample"].shape[0], world.picture.tokens, device=world.device)
    mask[:, world.picture.noise % 7 + 1 :: 2] = 0
    return _steps(world, pipe, inputs, encoder_attention_mask=mask)


def _residuals(world: World, pipe: Any) -> torch.Tensor:
    """Residuals like those of a ControlNet."""
    inputs = _inputs(world, pipe)
    shapes: list[torch.Size] = []
    unet = world.twin.unet
    with torch.no_grad():
        x = unet.conv_in(inputs["sample"].to(unet.dtype))
    down, (height, width) = [], x.shape[2:]
    blocks = list(unet.down_blocks)
    for i, block in enumerate([None, *blocks]):
        for _ in range(1 if block is None else len(block.resnets)):
            channels = x.shape[1] if block is None else block.resnets[-1].out_channels
            shapes.append(torch.Size((x.shape[0], channels, height, width)))
        if block is not None and i < len(blocks):
            height, width = (height + 1) // 2, (width + 1) // 2
            shapes.append(torch.Size((x.shape[0], channels, height, width)))
    scale = 0.02 * (1 + world.picture.noise % 3)
    for shape in shapes:
        down.append(torch.full(shape, scale, device=world.device, dtype=world.dtype))
    return _steps(
        world,
        pipe,
        inputs,
        down_block_additional_residuals=down,
        mid_block_additional_residual=torch.full(
            shapes[-1], -scale, device=world.device, dtype=world.dtype
        ),
    )


class _Stop(Exception):  # noqa: N818
    """Ends a picture whose first call was all that was wanted."""


def _first_call(world: World) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the transformer's first call for the world's picture. No layer runs."""
    found: list[Any] = []

    def stop(module: Any, args: Any, kwargs: Any) -> None:
        found.append((args, kwargs))
        raise _Stop

    handle = world.twin_denoiser.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        _pipe(world, world.twin)
    except _Stop:
        pass
    finally:
        handle.remove()
    return found[0]


def _transformer(world: World, pipe: Any) -> torch.Tensor:
    """The transformer alone, at several timesteps; earlier outputs are used later."""
    args, kwargs = _first_call(world)
    outputs = []
    for i in range(world.picture.steps + 1):
        if "timestep" in kwargs:
            given = args, {**kwargs, "timestep": kwargs["timestep"] * 0.9**i}
        else:
            given = (args[0], args[1] * 0.9**i, *args[2:]), kwargs
        outputs += tree_leaves(world.denoiser(pipe)(*given[0], **given[1])[0])
    return torch.cat([output.flatten() for output in outputs])


def _transformer_prompt_written(world: World, pipe: Any) -> torch.Tensor:
    """The prompt is written in place between two calls."""
    args, kwargs = _first_call(world)
    args, kwargs = tree_map(_copied, (args, kwargs))
    outputs = []
    for i in range(world.picture.steps + 1):
        outputs += tree_leaves(world.denoiser(pipe)(*args, **kwargs)[0])
        for tensor in tree_leaves(kwargs.get("encoder_hidden_states", args[2:3])):
            tensor.mul_(0.9 - 0.1 * i)
    return torch.cat([output.flatten() for output in outputs])


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def ways(world: World) -> list[str]:
    """The ways that the world's model can be drawn with."""
    if world.is_unet:
        return sorted(WAYS.keys() - _OF_TRANSFORMERS)
    has_image_to_image = world.model in ("sd3", "flux")
    more = [("from_pipe", has_image_to_image), ("guided_in_some_steps", world.model == "sd3")]
    return sorted({"pipe", *_OF_TRANSFORMERS, *(name for name, can in more if can)})


# More arguments of pipelines, and of their calls.
EXTRA: dict[str, dict[str, Any]] = {
    "sd15": {"requires_safety_checker": False},
    "sd15-wide": {"requires_safety_checker": False},
    "sdxl": {"add_watermarker": False},
}
LORA_SCALE_IN = {
    "sd15": "cross_attention_kwargs",
    "sd15-wide": "cross_attention_kwargs",
    "sdxl": "cross_attention_kwargs",
    "sd3": "joint_attention_kwargs",
    "flux": "joint_attention_kwargs",
    "qwen_image": "attention_kwargs",
}
_OF_TRANSFORMERS = {"transformer", "transformer_prompt_written"}

WAYS = {
    "pipe": _pipe,
    "from_pipe": _from_pipe,
    "guided_in_some_steps": _guided_in_some_steps,
    "transformer": _transformer,
    "transformer_prompt_written": _transformer_prompt_written,
    "unet": _unet,
    "plain_timestep": _plain_timestep,
    "prompt_written": _prompt_written,
    "outputs_kept": _outputs_kept,
    "two_streams": _two_streams,
    "mask": _mask,
    "residuals": _residuals,
}
