"""The trial run of a graph in a worker process, which may crash in it."""

from __future__ import annotations

import math

import torch

from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.checking.compare_with_eager import compare_all
from onediff_ext.engine.export.exporter import PROMPT_TOKENS, input_fakes, is_channels_last

# Sizes that no example has: batch 1, odd sides, few tokens. By axis, counted from 0.
_TRIALS = ((1, 19, 5, 7), (3, 13, 2, 13))
_ALLOWED_IN_8_BITS = 1e-1


def try_out(
    program: torch.export.ExportedProgram, graph: Graph, device: torch.device
) -> str | None:
    """Compare a graph with eager operators, at sizes that its example did not have.

    Args:
        program: The exported block; its graph module runs the eager operators.
        graph: The loaded graph.
        device: The device to run on.

    Returns:
        What is wrong, or None when the graph may be used.
    """
    fakes = input_fakes(program)
    generator = torch.Generator().manual_seed(0)
    # A difference in the last digit before a rounding to 8 bits becomes a whole 8-bit step.
    allowed = _ALLOWED_IN_8_BITS if any(_is_8_bit(fake) for fake in fakes) else None
    for trial in _TRIALS:
        sizes: dict[object, int] = {}
        arguments = [_random_like(fake, trial, sizes, device, generator) for fake in fakes]
        with torch.no_grad():
            expected = program.graph_module(*arguments)
            comparison = compare_all(graph(arguments), expected, allowed)
        if comparison.problem is not None:
            shapes = [tuple(argument.shape) for argument in arguments[-2:]]
            return f"at sizes {shapes} the new graph {comparison.problem}"
    return None


def usual_inputs(
    program: torch.export.ExportedProgram, shorter: int, device: torch.device
) -> list[torch.Tensor]:
    """Return noise for a program's weights and inputs, of the sizes that it is compiled for.

    Args:
        program: The exported block.
        shorter: Divides the sides of images, and its square the number of tokens; 1 for the sizes
            themselves, which are those of a large picture.
        device: Where the noise lies.
    """
    fakes = input_fakes(program)
    sizes: dict[object, int] = {}
    for fake in fakes:
        for axis, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt) and size.node.expr not in sizes:
                hint = int(size.node.hint)
                is_short = axis == 0 or hint == PROMPT_TOKENS
                divisor = 1 if is_short else shorter if len(fake.shape) == 4 else shorter**2
                sizes[size.node.expr] = max(1, hint // divisor)
    generator = torch.Generator().manual_seed(0)
    return [_random_like(fake, (), sizes, device, generator) for fake in fakes]


def _random_like(
    fake: torch.Tensor,
    trial: tuple[int, ...],
    sizes: dict[object, int],
    device: torch.device,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return noise with the shape, layout and usual scale of one input of a program."""
    shape: list[int] = []
    for axis, size in enumerate(fake.shape):
        if isinstance(size, torch.SymInt):
            shape.append(sizes.get(expr := size.node.expr) or _size_of(expr, trial[axis], sizes))
        else:
            shape.append(int(size))
    values = torch.randn(shape, generator=generator)
    if any(isinstance(size, torch.SymInt) for size in fake.shape):
        layout = torch.channels_last if is_channels_last(fake) else torch.contiguous_format
        return values.to(device=device, dtype=fake.dtype).contiguous(memory_format=layout)
    if _is_8_bit(fake):
        return (values * 32).clamp(-127, 127).to(device=device, dtype=fake.dtype)
    if fake.dtype == torch.float32 and shape[:1] == [1]:  # scales of 8-bit weights
        return ((1 + values.abs()) * 1e-3).to(device)
    # A weight, scaled by its fan-in so that deep products stay of order 1.
    values *= max(1, math.prod(shape[1:])) ** -0.5
    like = torch.empty_strided(shape, fake.stride(), dtype=fake.dtype, device=device)
    return like.copy_(values)


def _size_of(symbol: object, wanted: int, sizes: dict[object, int]) -> int:
    """Return a symbol's size; all symbols have different ones."""
    if symbol not in sizes:
        while wanted in sizes.values():
            wanted += 2
        sizes[symbol] = wanted
    return sizes[symbol]


def _is_8_bit(fake: torch.Tensor) -> bool:
    return fake.dtype.itemsize == 1
