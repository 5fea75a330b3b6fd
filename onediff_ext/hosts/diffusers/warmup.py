"""Warm-up of a compiled diffusers pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from onediff_ext.core.components import Role
from onediff_ext.core.errors import OptionError
from onediff_ext.core.shapes import BatchShape
from onediff_ext.hosts.diffusers.compile import compiled_state
from onediff_ext.hosts.diffusers.probe import probe, unet_inputs
from onediff_ext.session.warm_up import WarmUp
from onediff_ext.session.warm_up_report import WarmUpListener


def pipe_warm_up(
    pipe: Any,
    shapes: Sequence[BatchShape],
    listen: WarmUpListener | None = None,
    give_way: Callable[[], bool] = lambda: False,
    measured_before: int = 0,
) -> WarmUp:
    """Create the warm-up of a compiled pipeline; call its `run`.

    Args:
        pipe: A pipeline compiled by `compile_pipe`.
        shapes, listen, give_way, measured_before: See `WarmUp`.

    Raises:
        OptionError: The pipeline is not compiled.
    """
    compiled = compiled_state(pipe)
    if compiled is None:
        raise OptionError("This pipeline is not compiled.", "Call compile_pipe(pipe) first.")
    unets = [component for component in compiled.components if component.role is Role.UNET]
    device = next(pipe.unet.parameters()).device

    def step(shape: BatchShape, noise: torch.Generator) -> None:
        inputs = unet_inputs(
            pipe.unet,
            noise,
            batch=2 * shape.batch,
            height_latent=shape.height_px // 8,
            width_latent=shape.width_px // 8,
        )
        with torch.no_grad():
            pipe.unet(**inputs)

    others = partial(probe, pipe, without=(Role.UNET,))
    return WarmUp(
        compiled.session,
        unets,
        step,
        others,
        shapes,
        device,
        listen,
        give_way,
        measured_before,
    )
