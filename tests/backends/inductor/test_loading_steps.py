"""What the first load on a GPU imports is done once in a process; no GPU is needed for it."""

from __future__ import annotations

import torch

from onediff_ext.backends.inductor.backend import InductorBackend

CUDA = torch.device("cuda")


def test_what_is_done_is_left_out() -> None:
    for step in InductorBackend().loading_steps(CUDA):
        step()
    assert InductorBackend().loading_steps(CUDA) == []
    assert list(InductorBackend().loading_steps(torch.device("cpu"))) == []
