"""The trial of a new graph, in the process that built it and may die of it."""

from __future__ import annotations

import math

import torch

from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.checking.compare_with_eager import compare
from onediff_ext.engine.export.exporter import input_fakes, is_channels_last

# Sizes that no example has: batch 1, odd sides, few tokens. By axis, counted from 0.
_TRIALS = ((1, 19, 5, 7), (3, 13, 2, 13))
_ALLOWED_IN_8_BITS = 1e-1


def try_out(
    program: torch.export.ExportedProgram, graph: Graph, device: torch.device
) -> str | None:
    """Run a new graph at sizes that its example did not have, against eager operators.

    Returns:
        What is wrong, or None when the graph may be stored.
    """
    fakes = input_fakes(program)
    generator = torch.Generator().manual_seed(0)
    # A last digit that differs before a rounding to 8 bits is a step of 8 bits after it.
    allowed = _ALLOWED_IN_8_BITS if any(_is_8_bit(fake) for fake in fakes) else None
    for trial in _TRIALS:
        sizes: dict[object, int] = {}
        arguments = [_random_like(fake, trial, sizes, device, generator) for fake in fakes]
        with torch.no_grad():
            expected = program.graph_module(*arguments)[0]
            comparison = compare(graph(arguments), expected, allowed)
        if comparison.problem is not None:
            shapes = [tuple(argument.shape) for argument in arguments[-2:]]
            return f"at sizes {shapes} the new graph {comparison.problem}"
    return None


def _random_like(
    fake: torch.Tensor,
    trial: tuple[int, ...],
    sizes: dict[object, int],
    device: torch.device,
    generator: torch.Generator,
) -> torch.Tensor:
    """Noise of the shape, layout and usual scale of one of a program's inputs."""
    shape: list[int] = []
    for axis, size in enumerate(fake.shape):
        if isinstance(size, torch.SymInt):
            shape.append(sizes.setdefault(size.node.expr, trial[axis]))
        else:
            shape.append(int(size))
    values = torch.randn(shape, generator=generator)
    if any(isinstance(size, torch.SymInt) for size in fake.shape):
        layout = torch.channels_last if is_channels_last(fake) else torch.contiguous_format
        return values.to(device=device, dtype=fake.dtype).contiguous(memory_format=layout)
    if _is_8_bit(fake):
        return (values * 32).clamp(-127, 127).to(device=device, dtype=fake.dtype)
    if fake.dtype == torch.float32 and shape[:1] == [1]:  # scales of such weights
        return ((1 + values.abs()) * 1e-3).to(device)
    # A weight: at the usual scale of its fan-in, so that deep products stay of order 1.
    values *= max(1, math.prod(shape[1:])) ** -0.5
    like = torch.empty_strided(shape, fake.stride(), dtype=fake.dtype, device=device)
    return like.copy_(values)


def _is_8_bit(fake: torch.Tensor) -> bool:
    return fake.dtype.itemsize == 1
