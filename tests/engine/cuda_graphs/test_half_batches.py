"""A forward that is run on the halves of its batch."""

from __future__ import annotations

from typing import Any

import torch

from onediff_ext.engine.cuda_graphs.half_batches import run_in_halves


def test_lists_of_the_call_are_emptied_as_by_the_whole_batch() -> None:
    """diffusers' UNet pops a T2I-Adapter's residuals from the caller's list."""

    def forward(x: torch.Tensor, residuals: list[torch.Tensor], notes: dict[str, Any]) -> Any:
        notes["images"] = True
        while len(residuals) > 1:
            x = x + residuals.pop(0)
        return x

    def call() -> tuple[torch.Tensor, list[torch.Tensor], dict[str, Any]]:
        return torch.ones(4, 2, 8, 8), [torch.full((4, 2, 8, 8), float(n)) for n in range(3)], {}

    whole, halves = call(), call()
    expected = forward(*whole)
    found = run_in_halves(forward, halves, {}, torch.OutOfMemoryError("none"))
    assert torch.equal(found, expected)
    assert len(halves[1]) == len(whole[1]) == 1
    assert torch.equal(halves[1][0], whole[1][0])
    assert halves[2] == whole[2]
