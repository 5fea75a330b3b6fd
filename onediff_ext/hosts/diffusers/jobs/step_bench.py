"""Times single steps of a UNet or transformer, eager and compiled, size by size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from onediff_ext.core.errors import OptionError
from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.checking.compare_with_eager import compare
from onediff_ext.hosts.diffusers.compile import CompiledPipe, compiled_state
from onediff_ext.hosts.diffusers.denoiser import denoiser_of
from onediff_ext.hosts.diffusers.probe import denoiser_inputs


@dataclass(frozen=True)
class StepTiming:
    """The times of one size.

    Args:
        shape: Size in pixels and images at once; CFG doubles a UNet's batch.
        first_s: Seconds of the first compiled step at this size.
        eager_ms, compiled_ms: Medians over the rounds.
        eager_ms_p95, compiled_ms_p95: 95th percentiles.
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
        """Eager time divided by compiled time."""
        return self.eager_ms / self.compiled_ms


def time_steps(pipe: Any, shape: BatchShape, rounds: int) -> StepTiming:
    """Time single forwards of the denoiser with CFG, compiled and eager in turns.

    Args:
        pipe: A pipeline after `compile_pipe`.
        shape: Size and images at once.
        rounds: Measured forwards of each.
    """
    compiled = compiled_state(pipe)
    assert compiled is not None
    denoiser = denoiser_of(pipe)
    inputs = denoiser_inputs(
        denoiser,
        torch.Generator().manual_seed(0),
        pictures=shape.batch,
        height_px=shape.height_px,
        width_px=shape.width_px,
    )
    if inputs is None:
        raise OptionError(f"{type(denoiser).__name__} cannot be measured.", "Draw with it instead.")
    device = next(denoiser.parameters()).device
    with torch.no_grad():
        first_s, output = _timed(denoiser, inputs, device)
        with paused(compiled):
            _, expected = _timed(denoiser, inputs, device)
        _timed(denoiser, inputs, device)
        eager, fast = [], []
        for _ in range(rounds):  # interleaved, so that a slow moment affects both
            fast.append(_timed(denoiser, inputs, device)[0])
            with paused(compiled):
                eager.append(_timed(denoiser, inputs, device)[0])
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
    """Run all components eager, in the same memory layout, within a ``with`` block."""
    with ExitStack() as stack:
        for component in compiled.components:
            stack.enter_context(component.paused())
        yield


def _timed(
    denoiser: Any, inputs: dict[str, Any], device: torch.device
) -> tuple[float, torch.Tensor]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    output = denoiser(**inputs).sample
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return seconds, torch.stack(output) if isinstance(output, list) else output


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]
