"""One picture on two GPUs, with CUDA graphs on both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.session import speed_trial
from onediff_ext.session.session import Session
from tests.support import models
from tests.support.draw import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ROUNDING = 1e-4  # of float32, without TF32
STEPS = 5


@pytest.mark.parametrize("model", ["sd15", "sdxl"])
def test_pictures_are_those_of_one_gpu(
    make_session: Callable[..., Session], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes take turns, so that replays of one size overwrite what those of another returned."""
    monkeypatch.setattr(speed_trial, "_UNTIMED_ON_TWO", 10**6)  # a tiny model is slower on two
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    pipe, twin = (getattr(models, model)().to("cuda:0") for _ in range(2))
    session = make_session(spot_checks=False, cfg_parallel="auto")
    compile_pipe(pipe, session=session, ignores=["vae"])

    def draw(from_pipe: object, width_px: int) -> torch.Tensor:
        found: torch.Tensor = from_pipe(  # type: ignore[operator]
            prompt="a fox",
            negative_prompt="blurry",
            height=64,
            width=width_px,
            num_inference_steps=STEPS,
            guidance_scale=5.0,
            generator=torch.Generator().manual_seed(3),
            output_type="latent",
        ).images
        return found

    try:
        state = compiled_state(pipe)
        assert state is not None
        parallel = state.components[0].cfg_parallel
        assert parallel is not None
        for _ in range(4):
            for width_px in (64, 72, 136):
                assert relative_error(draw(pipe, width_px), draw(twin, width_px)) < ROUNDING
        assert (len(parallel.devices), parallel.reason) == (2, "")
        assert all(kind.graph is not None for kind in session.kinds)
        assert parallel.replica is not None
        assert parallel.replica.captured is not None
        assert parallel.replica.captured.replayed
    finally:
        undo_compile(pipe)
