"""Pictures with a gate, and what they have to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onediff_ext.engine.guidance.guided_forward import GuidedForward
from tests.hosts.diffusers.test_chosen_guidance_steps import draw
from tests.support.plain_gate import plain_gate

GATE, INTERVAL = "gate:0.5", "interval:0-0.5"
STEPS, GUIDED = 4, 2


def expected(pipe: Any, guided: int = GUIDED, **given: Any) -> torch.Tensor:
    """Latents by the gate written out, with guidance in so many steps."""
    with plain_gate(pipe, guided):
        return draw(pipe, **given)


def reason_of(guided: GuidedForward) -> str:
    """Why cross-attention was computed after the gate, or ""."""
    assert guided.gate is not None
    return guided.gate.reason


def at(step: int, change: Callable[[Any, dict[str, Any]], None]) -> dict[str, Any]:
    """Arguments with a callback that changes something after a step."""

    def callback(pipe: Any, index: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index == step:
            change(pipe, tensors)
        return tensors

    return {"callback_on_step_end": callback}
