"""diffusers' other pipelines of transformer models, tiny: from pictures, and with ControlNets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from PIL import Image

from tests.support import transformer_models as models
from tests.support.models import build
from tests.support.transformer_models import LATENT_CHANNELS, MODELS, TEXT_WIDTH

WIDTH_PX, HEIGHT_PX = 64, 96

_PICTURE = torch.rand(1, 3, HEIGHT_PX, WIDTH_PX, generator=torch.Generator().manual_seed(7))
_MASK = (torch.arange(WIDTH_PX) < 32).float().expand(1, 1, HEIGHT_PX, WIDTH_PX)
_IMAGE = Image.effect_noise((WIDTH_PX, HEIGHT_PX), 60).convert("RGB")
_FROM = {"image": _PICTURE}
_WITHIN = {"image": _PICTURE, "mask_image": _MASK}
_CONTROL = {"control_image": _PICTURE}
_PACKED = 4 * LATENT_CHANNELS


class Variant(NamedTuple):
    """A pipeline to test.

    Args:
        name: Of the model, in `MODELS`.
        cls: diffusers' class.
        arguments: Of its call, besides those of text to image.
        parts: Makes the models that differ from those of text to image.
        without: Arguments of text to image that it does not take.
    """

    name: str
    cls: Any
    arguments: dict[str, Any]
    parts: Callable[[], dict[str, Any]] = dict
    without: tuple[str, ...] = ()

    def make(self) -> Any:
        """Make the pipeline."""
        return MODELS[self.name].make(cls=self.cls, **self.parts())

    def draw(self, pipe: Any, tokens: int = 7) -> torch.Tensor:
        """Draw two steps of one picture.

        Returns:
            Pixels [1, 3, H, W].
        """
        given = MODELS[self.name].embeddings(tokens)
        arguments = {
            **{name: value for name, value in given.items() if name not in self.without},
            "width": WIDTH_PX,
            "height": HEIGHT_PX,
            "num_inference_steps": 2,
            "output_type": "pt",
            "generator": torch.Generator().manual_seed(1),
            **self.arguments,
        }
        torch.manual_seed(1)  # some pipelines encode their picture with noise of their own
        with _small_sources():
            pixels: torch.Tensor = pipe(**arguments).images
        return pixels


@contextmanager
def _small_sources() -> Iterator[None]:
    """Qwen-Image-Edit reads pictures at 1024x1024 pixels; here at a 160th of these."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("edit", "edit_plus", "edit_inpaint"):
            module = getattr(diffusers.pipelines.qwenimage, f"pipeline_qwenimage_{name}")
            own = module.calculate_dimensions
            patch.setattr(module, "calculate_dimensions", functools.partial(_small, own))
        yield


def _small(own: Callable[..., Any], area_px: int, ratio: float) -> Any:
    return own(area_px // 160, ratio)


def qwen_controlnet(seed: int = 0) -> Any:
    """ControlNet of one block for `qwen_image_transformer`."""
    return build(
        diffusers.QwenImageControlNetModel,
        seed + 4,
        in_channels=_PACKED,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )


def _large() -> dict[str, Any]:
    return {"transformer": models.sd3_transformer(dual_attention_layers=())}


def _flux(**config: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"transformer": models.flux_transformer(**config)}


def _fill() -> dict[str, Any]:
    # Noise, the picture's rest, and a mask of 8x8 for each latent cell.
    channels = 2 * _PACKED + 4 * 64
    return {"transformer": models.flux_transformer(in_channels=channels, out_channels=_PACKED)}


def _chroma_with_a_guidance_entry() -> dict[str, Any]:
    # diffusers 0.42.1's inpainting pipeline reads an entry that Chroma's config has not.
    transformer = models.chroma_transformer()
    transformer.register_to_config(guidance_embeds=False)
    return {"transformer": transformer}


def _edit(**config: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"transformer": models.qwen_image_transformer(**config), "processor": None}


def _with(controlnet: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"controlnet": controlnet()}


_SD3_CONTROL = _with(models.sd3_controlnet)
_FLUX_CONTROL = _with(models.flux_controlnet)
_CONTROL_CHANNELS = _flux(in_channels=2 * _PACKED, out_channels=_PACKED)
_KONTEXT = {"max_area": WIDTH_PX * HEIGHT_PX, "_auto_resize": False}
_EDIT = {"image": _IMAGE, "true_cfg_scale": 3.0}
_NO_NEGATIVE = ("negative_prompt_embeds", "negative_pooled_prompt_embeds")

PIPELINES = {
    "sd3, 3.5-large": Variant("sd3", diffusers.StableDiffusion3Pipeline, {}, _large),
    "sd3, 3.5-large-turbo": Variant(
        "sd3", diffusers.StableDiffusion3Pipeline, {"guidance_scale": 0.0}, _large, _NO_NEGATIVE
    ),
    "flux, schnell": Variant("flux", diffusers.FluxPipeline, {}, _flux(guidance_embeds=False)),
    "sd3, image to image": Variant("sd3", diffusers.StableDiffusion3Img2ImgPipeline, _FROM),
    "sd3, inpainting": Variant("sd3", diffusers.StableDiffusion3InpaintPipeline, _WITHIN),
    "sd3, ControlNet": Variant(
        "sd3", diffusers.StableDiffusion3ControlNetPipeline, _CONTROL, _SD3_CONTROL
    ),
    "flux, image to image": Variant("flux", diffusers.FluxImg2ImgPipeline, _FROM),
    "flux, inpainting": Variant("flux", diffusers.FluxInpaintPipeline, _WITHIN),
    "flux, ControlNet": Variant("flux", diffusers.FluxControlNetPipeline, _CONTROL, _FLUX_CONTROL),
    "flux, ControlNet, image to image": Variant(
        "flux", diffusers.FluxControlNetImg2ImgPipeline, _FROM | _CONTROL, _FLUX_CONTROL
    ),
    "flux, ControlNet, inpainting": Variant(
        "flux", diffusers.FluxControlNetInpaintPipeline, _WITHIN | _CONTROL, _FLUX_CONTROL
    ),
    "flux, Fill": Variant("flux", diffusers.FluxFillPipeline, _WITHIN, _fill),
    "flux, Kontext": Variant("flux", diffusers.FluxKontextPipeline, _FROM | _KONTEXT),
    "flux, Kontext, inpainting": Variant(
        "flux", diffusers.FluxKontextInpaintPipeline, _WITHIN | _KONTEXT
    ),
    "flux, Canny and Depth": Variant(
        "flux", diffusers.FluxControlPipeline, _CONTROL, _CONTROL_CHANNELS
    ),
    "chroma, image to image": Variant("chroma", diffusers.ChromaImg2ImgPipeline, _FROM),
    "chroma, inpainting": Variant(
        "chroma", diffusers.ChromaInpaintPipeline, _WITHIN, _chroma_with_a_guidance_entry
    ),
    "flux2-klein, from a picture": Variant(
        "flux2", diffusers.Flux2KleinPipeline, {"image": _IMAGE}
    ),
    "flux2-klein, inpainting": Variant("flux2", diffusers.Flux2KleinInpaintPipeline, _WITHIN),
    "flux2-klein, distilled": Variant(
        "flux2",
        diffusers.Flux2KleinPipeline,
        {},
        lambda: {"is_distilled": True},
        without=_NO_NEGATIVE,
    ),
    "qwen-image, image to image": Variant("qwen_image", diffusers.QwenImageImg2ImgPipeline, _FROM),
    "qwen-image, inpainting": Variant("qwen_image", diffusers.QwenImageInpaintPipeline, _WITHIN),
    "qwen-image, ControlNet": Variant(
        "qwen_image", diffusers.QwenImageControlNetPipeline, _CONTROL, _with(qwen_controlnet)
    ),
    "qwen-image, Edit": Variant("qwen_image", diffusers.QwenImageEditPipeline, _EDIT, _edit()),
    "qwen-image, Edit-2511": Variant(
        "qwen_image",
        diffusers.QwenImageEditPlusPipeline,
        {**_EDIT, "image": [_IMAGE, _IMAGE]},
        _edit(zero_cond_t=True),
    ),
    "z-image, image to image": Variant("z_image", diffusers.ZImageImg2ImgPipeline, _FROM),
    "z-image, inpainting": Variant("z_image", diffusers.ZImageInpaintPipeline, _WITHIN),
}
"""By what they are."""
