"""Programs that write into their inputs are refused; those that write elsewhere are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.core.errors import ExportError
from onediff_ext.engine.export.input_writes import check_input_writes
from onediff_ext.session.session import Session
from tests.support.settled_twins import Twins

Function = Callable[[torch.Tensor], torch.Tensor]


class Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def program_of(function: Function) -> torch.export.ExportedProgram:
    return torch.export.export(Module(function), (torch.ones(2, 4, 6),), strict=False)


def add_to_an_output(x: torch.Tensor) -> torch.Tensor:
    torch.add(x, 1, out=x)
    return x


WRITING: dict[str, Function] = {
    "itself": lambda x: nn.functional.silu(x, inplace=True) + 1,
    "a view": lambda x: x.transpose(1, 2).flatten(1).mul_(2),
    "a chunk": lambda x: x.chunk(2, dim=1)[1].add_(1) + x[:, 2:],
    "a write of a write": lambda x: x.abs().add_(x.sub_(1)),
    "an item": lambda x: x[:, 0].fill_(3) + 1,
    "no conversion": lambda x: x.to(torch.float32).add_(1),
    "an argument for the output": add_to_an_output,
}
WRITING_ELSEWHERE: dict[str, Function] = {
    "nothing": lambda x: x + 1,
    "a copy": lambda x: x.clone().add_(1),
    "a result": lambda x: nn.functional.silu(x * 2, inplace=True),
    "a view of a result": lambda x: (x * 2).transpose(1, 2).add_(1),
    "a conversion": lambda x: x.to(torch.float64).add_(1),
}


@pytest.mark.parametrize("name", WRITING)
def test_writes_are_refused(name: str) -> None:
    with pytest.raises(ExportError, match="writes into its arguments"):
        check_input_writes(program_of(WRITING[name]))


@pytest.mark.parametrize("name", WRITING_ELSEWHERE)
def test_writes_elsewhere_are_not(name: str) -> None:
    check_input_writes(program_of(WRITING_ELSEWHERE[name]))


def test_no_picture_is_wrong_while_such_a_block_is_compared(
    make_session: Callable[..., Session],
) -> None:
    """Its activation is done in place on the embedding that all blocks share."""

    def work_in_place(unet: Any) -> None:
        unet.mid_block.resnets[0].nonlinearity = nn.SiLU(inplace=True)

    twins = Twins(make_session(spot_checks=False), work_in_place)
    assert twins.error(20) < 1e-5
