"""Guidance in some steps only, for diffusers pipelines whose batch is [negative prompt, prompt]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onediff_ext.core.errors import OptionError
from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.guidance.guided_forward import GuidedCall, GuidedForward
from onediff_ext.engine.guidance.sample_steps import run_sample_steps
from onediff_ext.engine.timesteps import are_of_one_tensor
from onediff_ext.engine.torch_compile import TORCH_COMPILES, compiled_modules
from onediff_ext.engine.validity.tensor_contents import version_of
from onediff_ext.hosts.diffusers.attention_processors import processor_eager_reason
from onediff_ext.hosts.diffusers.blocks import PURE_PROCESSORS
from onediff_ext.hosts.diffusers.denoiser import denoiser_of, takes_guidance

NO_GUIDANCE = "the picture has no guidance"
OTHER_CALL = "a call that is not the pipeline's own at its next step"
STEP_CACHE = "a step cache keeps results of whole batches"

# diffusers' classes whose loop calls the denoiser once at each timestep, with a batch of the
# negative prompts and then the prompts.
_PIPELINES = frozenset(
    {
        *(f"StableDiffusion{task}Pipeline" for task in ("", "Img2Img", "Inpaint", "Adapter")),
        *(f"StableDiffusionXL{task}Pipeline" for task in ("", "Img2Img", "Inpaint", "Adapter")),
        *(f"StableDiffusionControlNet{task}Pipeline" for task in ("", "Img2Img", "Inpaint")),
        *(f"StableDiffusionXLControlNet{task}Pipeline" for task in ("", "Img2Img", "Inpaint")),
        *(f"StableDiffusion3{task}Pipeline" for task in ("", "Img2Img", "Inpaint")),
        *(f"StableDiffusion3ControlNet{task}Pipeline" for task in ("", "Inpainting")),
    }
)

# The denoiser's arguments of which each tensor has a row for each picture of the batch, or one.
_KNOWN = frozenset(
    {
        *("sample", "hidden_states", "timestep", "encoder_hidden_states", "pooled_projections"),
        *("timestep_cond", "class_labels", "added_cond_kwargs"),
        *("down_block_additional_residuals", "mid_block_additional_residual"),
        *("down_intrablock_additional_residuals", "block_controlnet_hidden_states"),
    }
)
_layer_reason = partial(processor_eager_reason, pure=PURE_PROCESSORS)
_POSITIONS = ("sample", "timestep", "encoder_hidden_states")  # of a UNet; transformers get names


def check_guidance_steps(pipe: object, options: object) -> GuidanceOptions:
    """Read the guidance steps that a pipeline is to have.

    Args:
        pipe: The pipeline; it is not changed.
        options: What `GuidanceOptions.parse` takes.

    Raises:
        OptionError: They cannot be read, the pipeline's batch is not [negative prompt, prompt], or
            a gate is wanted of a transformer, which has no cross-attention.
    """
    chosen = GuidanceOptions.parse(options)
    if chosen.is_on and not _has_known_batch(pipe):
        raise OptionError(
            f"{type(pipe).__name__} is not known to draw prompt and negative prompt as one batch.",
            "Leave the guidance steps off. They work with pipelines of SD 1.x, SD 2.x, SDXL, SD3.",
        )
    if chosen.method == "gate" and getattr(pipe, "unet", None) is None:
        raise OptionError(
            f"{type(pipe).__name__} has a transformer, in which no cross-attention can be frozen.",
            f"Use interval:0-{chosen.end:g}, which leaves out guidance alone.",
        )
    return chosen


@contextmanager
def guidance_steps_for(pipe: Any, options: GuidanceOptions) -> Iterator[GuidedForward | None]:
    """Draw one call of a pipeline with guidance in some steps, within this ``with`` block.

    Pictures differ from those with guidance in all steps. What cannot be told apart is drawn with
    guidance: `GuidedForward.reason`.

    Args:
        pipe: The pipeline, compiled or eager, with or without DeepCache.
        options: Which steps have guidance; where they are off, nothing is changed.

    Returns:
        What was done, for a look at it afterwards; None where the options are off.

    Raises:
        OptionError: As `check_guidance_steps`.
    """
    if not check_guidance_steps(pipe, options).is_on:
        yield None
        return
    model = denoiser_of(pipe)
    calls = _PipelineCalls(pipe, watches_prompt=options.method == "gate")
    forward = GuidedForward(model, options, calls, _layer_reason)
    if compiled_modules(model):  # Dynamo sees no Python code of ours
        forward.reason = TORCH_COMPILES
        yield forward
        return
    with forward.drawing():
        yield forward


def guided_samples(
    pipe: Any, options: GuidanceOptions, step: Callable[[BatchShape, torch.Generator], object]
) -> Callable[[BatchShape, torch.Generator], object] | None:
    """Return what a warm-up runs for the guidance steps of pictures; None for nothing.

    Args:
        pipe: A compiled pipeline.
        options: Of the pictures.
        step: As for `WarmUp`.

    Raises:
        OptionError: As `check_guidance_steps`.
    """
    model = denoiser_of(pipe)
    is_on = check_guidance_steps(pipe, options).is_on
    if not is_on or takes_guidance(model) or compiled_modules(model):
        return None

    def run(shape: BatchShape, noise: torch.Generator) -> None:
        run_sample_steps(model, options, partial(step, shape, noise), _layer_reason)

    return run


def _has_known_batch(pipe: object) -> bool:
    owner = next((cls for cls in type(pipe).__mro__ if "__call__" in vars(cls)), object)
    return owner.__name__ in _PIPELINES and owner.__module__.startswith("diffusers.pipelines.")


class _PipelineCalls:
    """Reads the denoiser's calls in one call of a pipeline.

    The pipeline passes the elements of its scheduler's tensor of timesteps, in order: their place
    in its memory tells the step.

    Args:
        pipe: The pipeline.
        watches_prompt: Whether calls tell their prompts apart.
    """

    def __init__(self, pipe: Any, *, watches_prompt: bool) -> None:
        self._pipe, self._model = pipe, denoiser_of(pipe)
        self._watches_prompt = watches_prompt
        self._timesteps: torch.Tensor | None = None  # kept, so that no other one gets its memory
        self._first, self._last = 0, -1
        self._text: object = None  # the prompt of the last call, kept as the timesteps are
        self._written, self._prompts = 0, 0
        self._values: torch.Tensor | None = None  # of a prompt whose writes torch does not count

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> GuidedCall | str:
        given = {**dict(zip(_POSITIONS, args, strict=False)), **kwargs}
        latents = given.get("sample", given.get("hidden_states"))
        place = self._place(given.get("timestep"))
        if not isinstance(latents, torch.Tensor) or place is None or given.get("skip_layers"):
            return OTHER_CALL
        self._last = place
        if not self._pipe.do_classifier_free_guidance:
            return NO_GUIDANCE
        if getattr(self._model, "is_cache_enabled", False):
            return STEP_CACHE
        unknown = [name for name, value in given.items() if name not in _KNOWN and _tensors(value)]
        if unknown or len(args) > len(_POSITIONS):
            return f"an argument may have other rows: {', '.join(unknown) or 'more positions'}"
        assert self._timesteps is not None
        order = getattr(self._pipe.scheduler, "order", 1)
        left = len(self._timesteps) - self._first
        prompt = self._prompt_number(given.get("encoder_hidden_states"))
        step, steps = (place - self._first) // order, -(-left // order)
        is_last = place == len(self._timesteps) - 1
        return GuidedCall(step, steps, latents, prompt=prompt, is_last=is_last)

    def _prompt_number(self, text: object) -> int:
        """Another number for another tensor, or one that was written to.

        Under inference mode torch counts no writes, and this waits for a GPU.
        """
        if not self._watches_prompt or not isinstance(text, torch.Tensor):
            return 0
        written = version_of(text)
        is_same = text is self._text and written == self._written
        if not is_same or (self._values is not None and not torch.equal(text, self._values)):
            self._text, self._written = text, written
            self._values = text.clone() if written < 0 else None
            self._prompts += 1
        return self._prompts

    def _place(self, timestep: object) -> int | None:
        """The place of a timestep in the schedule; None where it is not the next one's."""
        if not isinstance(timestep, torch.Tensor):
            return None
        is_first = self._timesteps is None
        timesteps = self._pipe.scheduler.timesteps if is_first else self._timesteps
        if not isinstance(timesteps, torch.Tensor) or not are_of_one_tensor(timesteps, timestep):
            return None
        offset = timestep.storage_offset() - timesteps.storage_offset()
        place = int(offset // max(timesteps.stride(0), 1))
        if not self._last < place < len(timesteps):
            return None
        if is_first:
            self._timesteps, self._first = timesteps, place
        return place


def _tensors(value: object) -> bool:
    """Whether there is a tensor in an argument."""
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_flatten(value)[0])
