"""Pipelines of the same models for another task, such as image to image."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from onediff_ext.hosts.diffusers.denoiser import denoiser_of

if TYPE_CHECKING:
    from onediff_ext.hosts.diffusers.checkpoints.load import LoadedCheckpoint

_TASKS = {"txt2img": "", "img2img": "Img2Img", "inpaint": "Inpaint"}  # in diffusers' class names


def pipeline_for(task: str, pipe: Any, checkpoint: LoadedCheckpoint) -> Any:
    """Create a pipeline of the same models for another task.

    diffusers' AutoPipelines do this too, but they import all its architectures.

    Args:
        task: "txt2img", "img2img" or "inpaint".
        pipe: The checkpoint's pipeline.
        checkpoint: Says which pipelines there are.
    """
    import diffusers

    if checkpoint.transformer_model is not None:
        name = checkpoint.transformer_model.class_name(task)
    else:
        is_xl = checkpoint.architecture.startswith("sdxl")
        name = f"{'StableDiffusionXL' if is_xl else 'StableDiffusion'}{_TASKS[task]}Pipeline"
    cls = getattr(diffusers, name)
    known = {**pipe.config, **pipe.components, "add_watermarker": False}
    accepted = inspect.signature(cls.__init__).parameters
    made = type(cls.__name__, (_OnOneDevice, cls), {})
    pipeline = made(**{key: known[key] for key in accepted if key in known})
    pipeline.set_progress_bar_config(disable=True)
    if task == "img2img":
        _take_what_is_read(pipeline.image_processor)
    return pipeline


class _OnOneDevice:
    """A pipeline whose models are all on the denoiser's device.

    Before each picture, diffusers searches all modules of all models for an offloaded one.
    """

    @property
    def _execution_device(self) -> Any:
        return next(denoiser_of(self).parameters()).device


def _take_what_is_read(image_processor: Any) -> None:
    """Make diffusers' `VaeImageProcessor` return preprocessed pictures unchanged."""
    own = image_processor.preprocess

    def preprocess(image: Any, *size: Any, **named: Any) -> torch.Tensor:
        if isinstance(image, torch.Tensor):
            return image
        pixels: torch.Tensor = own(list(image), *size, **named)
        return pixels

    image_processor.preprocess = preprocess
