"""Draws with a feature, compiled and eager, and reads how the compiled picture was made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.diffusers.compile import (
    compile_pipe,
    compiled_state,
    new_session,
    one_picture,
    undo_compile,
)
from onediff_ext.session.session import Session
from tests.features.feature import Feature
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder

_PICTURES = 6  # built, checked, recorded, and the recording checked
_STEPS = 2


@dataclass(frozen=True)
class Outcome:
    """How a picture with a feature was made.

    Args:
        blocks: Blocks of the picture that ran through graphs.
        of_blocks: Blocks of the picture.
        is_captured: Whether the denoiser's forward was replayed from a recording.
        reason: Why blocks ran eager, or why the denoiser was not captured; else ``""``.
        error: norm(x - y) / norm(y) to eager's picture.
    """

    blocks: int
    of_blocks: int
    is_captured: bool
    reason: str
    error: float


def try_feature(feature: Feature, store: Path) -> Outcome:
    """Draw pictures with a feature until nothing changes any more.

    Args:
        feature: The feature.
        store: A folder for graphs.
    """
    pipe, twin = feature.make(0), feature.make(0)
    with _compiled(pipe, store) as session:
        options, twin_options = (
            {**feature.options, **(feature.prepare(p) or {})} for p in (pipe, twin)
        )
        for _ in range(_PICTURES):
            with one_picture(pipe):
                ours = _draw(pipe, options)
        status = session.status()
        captured = compiled_state(pipe).components[0].captured
        return Outcome(
            blocks=status.blocks_compiled,
            of_blocks=status.blocks_needed,
            is_captured=captured is not None and captured.reason == "",
            reason=_reason(status.reasons, captured),
            error=relative_error(ours, _draw(twin, twin_options)),
        )


def _reason(reasons: tuple[str, ...], captured: Any) -> str:
    if reasons:
        return reasons[0]
    return "" if captured is None else captured.reason


@contextmanager
def _compiled(pipe: Any, store: Path) -> Iterator[Session]:
    session = new_session(
        CompileOptions.parse({"backend": "eager", "build": "wait", "store": store})
    )
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=8)
    compile_pipe(pipe, session=session)
    try:
        yield session
    finally:
        undo_compile(pipe)
        session.close()


def _draw(pipe: Any, options: dict[str, Any]) -> torch.Tensor:
    options = {
        "prompt": "a red apple",
        "num_inference_steps": _STEPS,
        "guidance_scale": 3.0,
        "output_type": "np",
        "generator": torch.Generator().manual_seed(0),
        **options,
    }
    return torch.from_numpy(np.asarray(pipe(**options).images))
