"""The ways in which a picture is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.support.models import unet_inputs

if TYPE_CHECKING:
    from tests.differential.world import World


def draw(world: World, pipe: Any) -> torch.Tensor:
    """Latents of the world's picture, drawn by one of its pipelines."""
    return WAYS[world.picture.way](world, pipe)


def _options(world: World) -> dict[str, Any]:
    picture = world.picture
    prompts = dict(picture.prompts)
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
    if picture.lora_scale is not None:
        options["cross_attention_kwargs"] = {"scale": picture.lora_scale}
    for name, value in picture.extra.items():
        options[name] = value(world) if callable(value) else value
    return options


def _pipe(world: World, pipe: Any) -> torch.Tensor:
    picture = world.picture
    return pipe(height=picture.height, width=picture.width, **_options(world)).images


def _from_pipe(world: World, pipe: Any) -> torch.Tensor:
    """Image to image, by another pipeline of the same parts."""
    from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionXLImg2ImgPipeline

    cls = {
        "sd15": StableDiffusionImg2ImgPipeline,
        "sdxl": StableDiffusionXLImg2ImgPipeline,
    }[world.model]
    parts = {**pipe.components}
    if world.model == "sdxl":
        other = cls(**parts, add_watermarker=False)
    else:
        other = cls(**parts, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    picture = world.picture
    generator = torch.Generator().manual_seed(picture.noise)
    latent = torch.randn(1, 4, picture.height // 8, picture.width // 8, generator=generator)
    return other(image=latent.to(world.device, world.dtype), strength=1.0, **_options(world)).images


def _inputs(world: World, pipe: Any) -> dict[str, Any]:
    picture = world.picture
    inputs = unet_inputs(
        pipe.unet,
        picture.batch + 1,
        picture.height // 8,
        picture.width // 8,
        picture.tokens,
        picture.noise,
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


WAYS = {
    "pipe": _pipe,
    "from_pipe": _from_pipe,
    "unet": _unet,
    "plain_timestep": _plain_timestep,
    "prompt_written": _prompt_written,
    "outputs_kept": _outputs_kept,
    "mask": _mask,
    "residuals": _residuals,
}
