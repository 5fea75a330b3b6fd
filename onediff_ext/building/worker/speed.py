"""How long two graphs of one kind take, side by side in a worker process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from onediff_ext.building.worker.trial import usual_inputs
from onediff_ext.engine.backend_port import Graph

# Long beside the clock's steps, and short beside changes of the GPU's frequency.
_TURN_S = 0.02
_TURNS = 9


def call_times_ms(
    graphs: Sequence[Graph],
    program: torch.export.ExportedProgram,
    shorter: int,
    device: torch.device,
) -> list[float]:
    """Measure a call of each graph. They take turns, so that a change of pace meets all of them.

    Args:
        graphs: Of the same program.
        program: Says which weights and inputs they take; both are noise.
        shorter: As for `usual_inputs`.
        device: Where they run.

    Returns:
        The median of each graph's turns, in milliseconds a call.
    """
    arguments = usual_inputs(program, shorter, device)
    turns: list[list[float]] = [[] for _ in graphs]
    with torch.no_grad():
        runs = [_repeatable(graph, arguments, device) for graph in graphs]
        counts = [max(1, int(_TURN_S / _seconds(run, 3, device))) for run in runs]
        for _ in range(_TURNS):
            for run, count, times in zip(runs, counts, turns, strict=True):
                times.append(1e3 * _seconds(run, count, device))
    return [statistics.median(times) for times in turns]


def _repeatable(
    graph: Graph, arguments: list[torch.Tensor], device: torch.device
) -> Callable[[], object]:
    """Return a function that runs a graph as pictures do: on a GPU as part of a CUDA graph.

    Else a small graph would take as long as Python takes to launch it.
    """
    if device.type != "cuda":
        return lambda: graph(arguments)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(2):
            graph(arguments)
    stream.synchronize()
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording, stream=stream):
        graph(arguments)
    return recording.replay


def _seconds(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds a call of consecutive calls."""
    _wait(device)
    run()
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    _wait(device)
    return max(1e-9, (time.perf_counter() - start) / calls)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
