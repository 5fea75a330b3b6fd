"""The forwards that guidance steps bring to a picture, on inputs that a warm-up makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.engine.guidance.attention_gate import LayerReason
from onediff_ext.engine.guidance.guided_forward import GuidedCall, GuidedForward

_UNKNOWN = "the call has no latents"
STEPS = 2  # of the picture that a warm-up draws

# Tells what a call of a step is, as `CallReader` does.
StepReader = Callable[[Sequence[Any], Mapping[str, Any], int], GuidedCall | str]


def _by_latents(args: Sequence[Any], kwargs: Mapping[str, Any], step: int) -> GuidedCall | str:
    given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
    latents = next((each for each in given if each.ndim == 4), None)  # [2B, C, h, w]
    return _UNKNOWN if latents is None else GuidedCall(step, STEPS, latents)


def run_sample_steps(
    model: nn.Module,
    options: GuidanceOptions,
    run: Callable[[], object],
    layer_reason: LayerReason = lambda _: None,
    read_step: StepReader = _by_latents,
) -> None:
    """Run the forwards of a picture that differ from those with guidance.

    With a gate these are the gate's step and a later one, otherwise one without guidance.

    Args:
        model: The host's denoiser.
        options: Of the pictures; nothing is run where they are off.
        run: Runs one forward whose batch is prompt and negative prompt, of any numbers.
        layer_reason: As for `AttentionGate`.
        read_step: Of the host, for a picture of `STEPS`. By itself it knows a batch of
            [negative prompt, prompt] without other tensors of one row for each.
    """
    if not options.is_on:
        return
    has_gate = options.method == "gate"
    half = GuidanceOptions("gate" if has_gate else "interval", end=0.5)
    step = 0

    def read(args: Sequence[Any], kwargs: Mapping[str, Any]) -> GuidedCall | str:
        return read_step(args, kwargs, step)

    with GuidedForward(model, half, read, layer_reason).drawing():
        for step in (0, 1) if has_gate else (1,):  # noqa: B007
            run()
