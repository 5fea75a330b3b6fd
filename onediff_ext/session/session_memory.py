"""Gives a session's GPU memory back: CUDA graphs, merged weights and 8-bit copies."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.memory_budget import MemoryBudget

logger = logging.getLogger(__name__)


class MemoryHolder(Protocol):
    """What this module reads of a session."""

    @property
    def cuda_graphs(self) -> CudaGraphCache: ...
    @property
    def budget(self) -> MemoryBudget: ...


class SessionMemory:
    """Gives memory of a session back.

    Args:
        session: Whose CUDA graphs and derived weights are freed.
    """

    def __init__(self, session: MemoryHolder) -> None:
        self._session = session

    def give_back(self, *, ran_out: bool = False) -> None:
        """Give back what the rest of a picture needs; to be called when no denoiser runs any more.

        CUDA graphs stay if no picture has needed their memory so far. Merged weights and 8-bit
        copies stay while their model is where they are.

        Args:
            ran_out: Memory ran out in the host's own code: all of it is left to others from now on.
        """
        cuda_graphs = self._session.cuda_graphs
        if ran_out:
            cuda_graphs.note_ran_out()
        if self._session.budget.release_derived(elsewhere_only=not ran_out):
            cuda_graphs.drop_all("a host has moved the model")
        cuda_graphs.settle()

    def make_room(self, needed_bytes: int, device: torch.device) -> None:
        """Give back what a host is about to need: CUDA graphs first, then derived weights.

        Args:
            needed_bytes: What the host needs.
            device: Where.
        """
        cuda_graphs, budget = self._session.cuda_graphs, self._session.budget
        if cuda_graphs.make_room(needed_bytes, device):
            logger.info("The host needs %d MB: CUDA graphs are gone", needed_bytes >> 20)
        free = budget.free_bytes(device, cuda_graphs.size_bytes)
        if free is not None and free < needed_bytes and budget.release_derived():
            budget.release_cached()

    def returnable_bytes(self) -> int:
        """Return how many bytes in use by tensors `make_room` would give back.

        The pools of CUDA graphs come on top. torch, and so the hosts, count them as unused.
        """
        held = self._session.cuda_graphs.held_bytes()
        derived_bytes = self._session.budget.derived_bytes()
        return held["buffers"] + held["kept"] + max(held["weights"], derived_bytes)
