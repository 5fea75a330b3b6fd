"""The backend that compiles nothing."""

from __future__ import annotations

import torch
from torch import nn

from onediff_ext.backends.eager import EagerBackend

CPU = torch.device("cpu")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(self.norm(x))


def test_a_picture_of_one_colour_is_exact_in_nhwc() -> None:
    """torch's own GroupNorm is off by 2e-5 there (torch 2.13)."""
    torch.manual_seed(0)
    picture = torch.randn(1, 3, 96, 96)
    picture[..., 48:] = 0
    with torch.no_grad():
        image = nn.Conv2d(3, 64, 3, padding=1)(picture)
        block = _Block()
        x = image.contiguous(memory_format=torch.channels_last)
        exact = block.double()(image.double())
        program = torch.export.export(block.float(), (x,), strict=False)
        backend = EagerBackend()
        graph = backend.load(backend.build(program, CPU), CPU)
        (found,) = graph([*block.parameters(), x])
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert ((found - exact).norm() / exact.norm()).item() < 1e-6
