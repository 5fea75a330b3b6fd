"""The features; importing this module registers all of them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

from tests.features.feature import (
    Options,
    feature,
    one_width_sd15,
    plain,
    small_flux,
    small_sd3,
    small_sd15,
    small_sdxl,
)
from tests.support import adapter_weights, models, transformer_models

_PIPELINES = "Pipelines"
_ARGUMENTS = "Arguments of a call"
_ADAPTERS = "LoRA and other adapters"
_ATTENTION = "Attention"
_MODEL = "Settings of the model"
_MEMORY = "Memory and precision"
_FOREIGN = "Your own code"
_SIDE = 64


_IMAGE = torch.rand(1, 3, _SIDE, _SIDE, generator=torch.Generator().manual_seed(7))
_MASK = (torch.arange(_SIDE) < _SIDE // 2).float().expand(1, 1, _SIDE, _SIDE)
_SIZE = {"height": _SIDE, "width": _SIDE}


def _image_to_image(seed: int) -> Any:
    from diffusers import AutoPipelineForImage2Image

    return _quiet(AutoPipelineForImage2Image.from_pipe(small_sd15(seed)))


def _inpaint(seed: int) -> Any:
    return models.sd15_inpaint(seed, widths=(32, 64), attention=(True, False))


def _controlnet(seed: int) -> Any:
    from diffusers import StableDiffusionControlNetPipeline

    pipe = small_sd15(seed)
    net = models.controlnet_for(pipe.unet, seed)
    return _quiet(StableDiffusionControlNetPipeline(**pipe.components, controlnet=net))


def _two_controlnets(seed: int) -> Any:
    from diffusers import StableDiffusionControlNetPipeline

    pipe = small_sd15(seed)
    nets = [models.controlnet_for(pipe.unet, seed + i) for i in range(2)]
    return _quiet(StableDiffusionControlNetPipeline(**pipe.components, controlnet=nets))


def _t2i_adapter(seed: int) -> Any:
    from diffusers import StableDiffusionAdapterPipeline, T2IAdapter

    pipe = small_sd15(seed)
    adapter = T2IAdapter(
        in_channels=3, channels=[32, 64], num_res_blocks=1, downscale_factor=8
    ).eval()
    models.randomize(adapter, seed)
    parts = {name: part for name, part in pipe.components.items() if name != "image_encoder"}
    return _quiet(StableDiffusionAdapterPipeline(**parts, adapter=adapter))


def _perturbed_attention(seed: int) -> Any:
    from diffusers import AutoPipelineForText2Image

    pipe = small_sd15(seed)
    return _quiet(
        AutoPipelineForText2Image.from_pipe(pipe, enable_pag=True, pag_applied_layers=["mid"])
    )


def _lcm(seed: int) -> Any:
    return models.lcm(seed, widths=(32, 64), attention=(True, False))


class Halved(AttnProcessor2_0):
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = super().__call__(*args, **kwargs)
        return 0.5 * output


class Louder(torch.nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.1 * super().forward(x)


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


plain(_PIPELINES, "text to image, SD 1.x", options=_SIZE)
plain(_PIPELINES, "text to image, SDXL", make=small_sdxl, options=_SIZE)
_SD3 = {"prompt": None, **transformer_models.sd3_embeddings(7), **_SIZE}
_FLUX = {"prompt": None, **transformer_models.flux_embeddings(7), **_SIZE}
plain(_PIPELINES, "text to image, SD3.5", make=small_sd3, options=_SD3)
plain(_PIPELINES, "text to image, Flux.1", make=small_flux, options=_FLUX)
plain(_PIPELINES, "latent consistency models", make=_lcm, options=_SIZE)
plain(
    _PIPELINES,
    "image to image",
    make=_image_to_image,
    options={"image": _IMAGE, "strength": 1.0},
)
plain(
    _PIPELINES,
    "inpainting",
    make=_inpaint,
    options={"image": _IMAGE, "mask_image": _MASK, "strength": 1.0, **_SIZE},
)
plain(_PIPELINES, "ControlNet", make=_controlnet, options={"image": _IMAGE})
plain(
    _PIPELINES,
    "several ControlNets",
    make=_two_controlnets,
    options={"image": [_IMAGE, 1 - _IMAGE]},
)
plain(_PIPELINES, "T2I-Adapter", make=_t2i_adapter, options={"image": _IMAGE})
plain(
    _PIPELINES,
    "perturbed attention guidance (PAG)",
    make=_perturbed_attention,
    options={"pag_scale": 3.0, **_SIZE},
)

plain(_ARGUMENTS, "any height and width", options={"height": 72, "width": 104})
plain(_ARGUMENTS, "`num_images_per_prompt`", options={"num_images_per_prompt": 3, **_SIZE})
plain(_ARGUMENTS, "`guidance_scale=1`", options={"guidance_scale": 1.0, **_SIZE})
plain(_ARGUMENTS, "`guidance_rescale`", options={"guidance_rescale": 0.7, **_SIZE})


@feature(_ARGUMENTS, "`prompt_embeds` of any length", options=_SIZE)
def _long_prompt(pipe: Any) -> Options:
    generator = torch.Generator().manual_seed(3)
    shape = (1, 154, pipe.unet.config.cross_attention_dim)
    names = ("prompt_embeds", "negative_prompt_embeds")
    return {"prompt": None, **{name: torch.randn(shape, generator=generator) for name in names}}


@feature(_ARGUMENTS, "`callback_on_step_end`", options=_SIZE)
def _callback(pipe: Any) -> Options:
    return {"callback_on_step_end": lambda _pipe, _step, _timestep, tensors: tensors}


@feature(_ARGUMENTS, "`timesteps`, or another scheduler", options=_SIZE)
def _scheduler(pipe: Any) -> None:
    from diffusers import DPMSolverMultistepScheduler

    pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)


def _load_loras(pipe: Any, *names: str) -> None:
    states = [
        adapter_weights.lora_tensors(pipe, text=False, rank=2, seed=i) for i in range(len(names))
    ]
    for name, state in zip(names, states, strict=True):
        pipe.load_lora_weights(state, adapter_name=name)


@feature(_ADAPTERS, "`load_lora_weights`", options=_SIZE)
def _lora(pipe: Any) -> None:
    _load_loras(pipe, "a")


@feature(_ADAPTERS, "`set_adapters` with weights", options=_SIZE)
def _loras(pipe: Any) -> None:
    _load_loras(pipe, "a", "b")
    pipe.set_adapters(["a", "b"], [0.7, 0.4])


@feature(_ADAPTERS, "`disable_lora`", options=_SIZE)
def _lora_off(pipe: Any) -> None:
    _load_loras(pipe, "a")
    pipe.disable_lora()


@feature(_ADAPTERS, "`fuse_lora`", options=_SIZE)
def _lora_fused(pipe: Any) -> None:
    _load_loras(pipe, "a")
    pipe.fuse_lora()


@feature(_ADAPTERS, '`cross_attention_kwargs={"scale": …}`', options=_SIZE)
def _lora_scale(pipe: Any) -> Options:
    _load_loras(pipe, "a")
    return {"cross_attention_kwargs": {"scale": 0.5}}


@feature(_ADAPTERS, "IP-Adapter", options=_SIZE)
def _ip_adapter(pipe: Any) -> Options:
    pipe.load_ip_adapter(
        adapter_weights.ip_adapter_tensors(pipe.unet),
        subfolder=None,
        weight_name=None,
        image_encoder_folder=None,
        low_cpu_mem_usage=False,
    )
    pipe.set_ip_adapter_scale(0.8)
    embeds = torch.randn(
        2, 1, adapter_weights.IMAGE_WIDTH, generator=torch.Generator().manual_seed(4)
    )
    return {"ip_adapter_image_embeds": [embeds]}


@feature(_ATTENTION, "`set_attn_processor(AttnProcessor())`", options=_SIZE)
def _plain_processor(pipe: Any) -> None:
    pipe.unet.set_attn_processor(AttnProcessor())


@feature(_ATTENTION, "a processor of your own", options=_SIZE)
def _own_processor(pipe: Any) -> None:
    pipe.unet.set_attn_processor(Halved())


@feature(_ATTENTION, "`fuse_qkv_projections`", options=_SIZE)
def _fused(pipe: Any) -> None:
    pipe.fuse_qkv_projections()


@feature(_ATTENTION, "`enable_attention_slicing`", options=_SIZE)
def _sliced(pipe: Any) -> None:
    pipe.enable_attention_slicing(1)


@feature(_MODEL, "`enable_freeu`", options=_SIZE)
def _freeu(pipe: Any) -> None:
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.4, b2=1.6)


@feature(_MODEL, 'tiling: `padding_mode = "circular"`', make=one_width_sd15, options=_SIZE)
def _tiling(pipe: Any) -> None:
    for module in pipe.unet.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.padding_mode = "circular"


@feature(_MODEL, "`unet.to(memory_format=torch.channels_last)`", options=_SIZE)
def _channels_last(pipe: Any) -> None:
    pipe.unet.to(memory_format=torch.channels_last)


@feature(_MODEL, "weights written in place", options=_SIZE)
def _weights_in_place(pipe: Any) -> None:
    with torch.no_grad():
        pipe.unet.conv_in.weight.mul_(1.1)


@feature(_MODEL, "`load_state_dict`", options=_SIZE)
def _state_dict(pipe: Any) -> None:
    pipe.unet.load_state_dict(
        models.unet(seed=9, widths=(32, 64), attention=(True, False)).state_dict()
    )


@feature(_MEMORY, "`vae.enable_tiling`", options={"height": 96, "width": 96})
def _vae_tiling(pipe: Any) -> None:
    pipe.vae.enable_tiling()
    pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 8, 64


@feature(_MEMORY, "`vae.enable_slicing`", options={"num_images_per_prompt": 2, **_SIZE})
def _vae_slicing(pipe: Any) -> None:
    pipe.vae.enable_slicing()


@feature(_MEMORY, "`enable_model_cpu_offload`", options=_SIZE)
def _model_offload(pipe: Any) -> None:
    from accelerate import cpu_offload_with_hook

    # As the method does, which calls a CPU "cpu:0" and then moves the model at each step.
    cpu_offload_with_hook(pipe.unet, torch.device("cpu"))


@feature(_MEMORY, "sequential offloading (`cpu_offload`)", options=_SIZE)
def _sequential_offload(pipe: Any) -> None:
    from accelerate import cpu_offload

    cpu_offload(pipe.unet, execution_device=torch.device("cpu"))


@feature(_MEMORY, "group offloading", options=_SIZE)
def _group_offload(pipe: Any) -> None:
    pipe.unet.enable_group_offload(
        onload_device=torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
    )


@feature(_MEMORY, "layerwise casting", options=_SIZE)
def _layerwise_casting(pipe: Any) -> None:
    pipe.unet.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


@feature(_MEMORY, "`bfloat16`", make=one_width_sd15, options=_SIZE, tolerance=1e-2)
def _bfloat16(pipe: Any) -> None:
    pipe.to(torch.bfloat16)


@feature(_FOREIGN, "a forward hook on a layer", options=_SIZE)
def _hook(pipe: Any) -> None:
    layer = next(m for m in pipe.unet.modules() if isinstance(m, torch.nn.Linear))
    layer.register_forward_hook(lambda _module, _args, output: output * 0.9)


@feature(_FOREIGN, "a layer's `forward` replaced", options=_SIZE)
def _replaced_forward(pipe: Any) -> None:
    layer = pipe.unet.mid_block.resnets[0].conv1
    own = layer.forward
    layer.forward = lambda x: own(x) * 0.9


@feature(_FOREIGN, "a layer exchanged for one of your own class", options=_SIZE)
def _own_layer(pipe: Any) -> None:
    pipe.unet.mid_block.resnets[0].conv1.__class__ = Louder
