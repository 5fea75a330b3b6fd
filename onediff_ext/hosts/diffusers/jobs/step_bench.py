"""Milliseconds of one UNet step, eager beside compiled, size by size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.checking.compare_with_eager import compare
from onediff_ext.hosts.diffusers.compile import CompiledPipe, compiled_state
from onediff_ext.hosts.diffusers.probe import unet_inputs


@dataclass(frozen=True)
class StepTiming:
    """One size.

    Args:
        shape: Size in pixels and pictures at once; CFG doubles the UNet's batch.
        first_s: Seconds of the first compiled step at this size.
        eager_ms, compiled_ms: Medians over the rounds; p95 beside them.
        error: ‖compiled - eager‖ / ‖eager‖.
    """

    shape: BatchShape
    first_s: float
    eager_ms: float
    eager_ms_p95: float
    compiled_ms: float
    compiled_ms_p95: float
    error: float

    @property
    def speedup(self) -> float:
        """How many times faster than eager."""
        return self.eager_ms / self.compiled_ms


def time_steps(pipe: Any, shape: BatchShape, rounds: int) -> StepTiming:
    """Time single UNet forwards of a compiled pipeline, with CFG, in turn with eager.

    Args:
        pipe: Went through `compile_pipe`.
        shape: Size and pictures at once.
        rounds: Measured forwards of each kind.
    """
    compiled = compiled_state(pipe)
    assert compiled is not None
    unet = pipe.unet
    inputs = unet_inputs(
        unet,
        torch.Generator().manual_seed(0),
        batch=2 * shape.batch,
        height_latent=shape.height_px // 8,
        width_latent=shape.width_px // 8,
    )
    with torch.no_grad():
        first_s, output = _timed(unet, inputs)
        with paused(compiled):
            _, expected = _timed(unet, inputs)
        _timed(unet, inputs)
        eager, fast = [], []
        for _ in range(rounds):  # interleaved, so that a slow moment hits both
            fast.append(_timed(unet, inputs)[0])
            with paused(compiled):
                eager.append(_timed(unet, inputs)[0])
    return StepTiming(
        shape,
        first_s,
        eager_ms=1e3 * statistics.median(eager),
        eager_ms_p95=1e3 * _p95(eager),
        compiled_ms=1e3 * statistics.median(fast),
        compiled_ms_p95=1e3 * _p95(fast),
        error=compare(output, expected).error,
    )


@contextmanager
def paused(compiled: CompiledPipe) -> Iterator[None]:
    """Run all components eager, in the same layout, for the length of a ``with`` block."""
    with ExitStack() as stack:
        for component in compiled.components:
            stack.enter_context(component.paused())
        yield


def _timed(unet: Any, inputs: dict[str, Any]) -> tuple[float, torch.Tensor]:
    device = inputs["sample"].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    output = unet(**inputs).sample
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, output


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]
