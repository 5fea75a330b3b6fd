"""A compiled pipeline beside an eager twin, which gets the same changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state
from onediff_ext.session.session import Session
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.models import sd15, unet, unet_inputs


class Twins:
    """A compiled pipe and an eager one with the same weights, after the compiled one has settled.

    Args:
        session: Of the compiled pipe.
        prepare: Changes both UNets before that.
        reason: Why the UNet is not recorded then.
        error: Of a step, at most.
        options: More arguments of `compile_pipe`.
    """

    def __init__(
        self,
        session: Session,
        prepare: Callable[[Any], object] = lambda _: None,
        reason: str = "",
        error: float = 1e-5,
        **options: Any,
    ) -> None:
        session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=4)
        self.pipe = sd15(seed=3)
        self.unets = (self.pipe.unet, unet(seed=3))
        for each in self.unets:
            prepare(each)
        compile_pipe(self.pipe, session=session, ignores=["vae"], **options)
        for seed in range(6):
            assert self.error(seed) < error
        assert self.captured.reason == reason, self.captured.reason

    @property
    def captured(self) -> Any:
        state = compiled_state(self.pipe)
        assert state is not None
        return state.components[0].captured

    @torch.no_grad()
    def error(self, seed: int, side: int = 8) -> float:
        """Of one step."""
        found, expected = (
            each(**unet_inputs(each, height_latent=side, width_latent=side, seed=seed)).sample
            for each in self.unets
        )
        return float((found - expected).norm() / expected.norm())

    def assert_right_after(self, change: Callable[[Any], object]) -> None:
        """Change both, and draw until the compiled one is recorded again."""
        with torch.no_grad():
            for each in self.unets:
                change(each)
        assert max(self.error(seed) for seed in range(10, 15)) < 1e-4
