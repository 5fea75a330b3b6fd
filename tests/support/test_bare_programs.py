"""A program that was read without its tensors' sizes runs the same operators."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from onediff_ext.engine.export.exporter import input_fakes, load_program, save_program
from tests.support.bare_programs import bare_programs


class Block(nn.Module):
    """Views, several outputs, and a size that is computed."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, right = (x @ y).chunk(2, dim=-1)
        tokens = left.reshape(left.shape[0] * left.shape[1], -1)
        return nn.functional.gelu(right), torch.cat([tokens, tokens + 1])


def test_the_same_operators_and_results_without_sizes(caplog: pytest.LogCaptureFixture) -> None:
    batch = torch.export.Dim("batch", min=1, max=64)
    shown = (torch.randn(3, 5, 8), torch.randn(8, 8))
    exported = torch.export.export(Block(), shown, dynamic_shapes=({0: batch}, None))
    payload = save_program(exported)
    whole = load_program(payload)
    with caplog.at_level(logging.WARNING), bare_programs(), ThreadPoolExecutor(1) as other:
        bare = load_program(payload)
        there = other.submit(load_program, payload).result()
    assert caplog.records == []
    assert bare.graph_module.code == whole.graph_module.code
    given = (torch.randn(7, 5, 8), torch.randn(8, 8))
    for found, expected in zip(bare.graph_module(*given), Block()(*given), strict=True):
        assert torch.equal(found, expected)
    assert input_fakes(bare) == [None, None]
    for program in (there, load_program(payload)):
        assert [fake.shape[1:] for fake in input_fakes(program)] == [(5, 8), (8,)]
