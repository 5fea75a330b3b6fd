"""Warm-up of a compiled diffusers pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from onediff_ext.core.components import Role
from onediff_ext.core.errors import OptionError
from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.hosts.diffusers.compile import compiled_state
from onediff_ext.hosts.diffusers.denoiser_calls import as_in_pipelines, timestep_dtype_of
from onediff_ext.hosts.diffusers.guidance_steps import guided_samples
from onediff_ext.hosts.diffusers.probe import denoiser_inputs, probe
from onediff_ext.session.warm_up import WarmUp
from onediff_ext.session.warm_up_report import WarmUpListener


def pipe_warm_up(
    pipe: Any,
    shapes: Sequence[BatchShape],
    listen: WarmUpListener | None = None,
    give_way: Callable[[], bool] = lambda: False,
    measured_before: int = 0,
    guidance_steps: GuidanceOptions | None = None,
) -> WarmUp:
    """Create the warm-up of a compiled pipeline; call its `run`.

    Args:
        pipe: A pipeline compiled by `compile_pipe`.
        shapes, listen, give_way, measured_before: See `WarmUp`.
        guidance_steps: Of the pictures that will be drawn; None for those of `compile_pipe`.

    Raises:
        OptionError: The pipeline is not compiled, its denoiser is not known, or it cannot have
            these guidance steps.
    """
    compiled = compiled_state(pipe)
    if compiled is None:
        raise OptionError("This pipeline is not compiled.", "Call compile_pipe(pipe) first.")
    denoisers = [component for component in compiled.components if component.role.is_denoiser]
    model = next(filter(None, (getattr(pipe, name, None) for name in ("unet", "transformer"))))
    device = next(model.parameters()).device
    if denoiser_inputs(model, torch.Generator()) is None:
        raise OptionError(
            f"{type(model).__name__} cannot be warmed up.", "Draw a picture of each size instead."
        )

    timestep_dtype = timestep_dtype_of(getattr(pipe, "scheduler", None))

    def step(shape: BatchShape, noise: torch.Generator) -> None:
        height_px, width_px = shape.height_px, shape.width_px
        inputs = denoiser_inputs(
            model, noise, pictures=shape.batch, height_px=height_px, width_px=width_px
        )
        assert inputs is not None
        args, kwargs = as_in_pipelines(model, inputs, timestep_dtype)
        with torch.no_grad():
            model(*args, **kwargs)

    steps = compiled.guidance_steps if guidance_steps is None else guidance_steps
    others = partial(probe, pipe, without=[role for role in Role if role.is_denoiser])
    return WarmUp(
        compiled.session,
        denoisers,
        step,
        others,
        shapes,
        device,
        listen,
        give_way,
        measured_before,
        guided_samples(pipe, steps, step),
    )
