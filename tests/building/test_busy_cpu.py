"""On a CPU that always draws, builds come at all."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from onediff_ext.core.priority import usable_cores
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.engine.machine import machine_digest
from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from onediff_ext.session.session import Session
from tests.support import models
from tests.support.draw import draw_latents, relative_error

TIMEOUT_S = 300


@pytest.fixture(autouse=True)
def workers_at_full_priority() -> None:
    """Workers give way here, as in use."""


def test_all_kinds_come_while_a_pipeline_draws_without_a_pause(
    open_session: Callable[..., Session],
) -> None:
    session, pipe = open_session(), models.one_width("sd15")
    expected = draw_latents(pipe)
    compile_pipe(pipe, session=session, ignores=("vae",))
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    longest_pause_s, estimates, ended = 0.0, [], time.monotonic()
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while not session.kinds or {kind.state for kind in session.kinds} != {KindState.READY}:
            assert time.monotonic() < deadline, session.status().line()
            longest_pause_s = max(longest_pause_s, time.monotonic() - ended)
            found = draw_latents(pipe)
            ended = time.monotonic()
            assert relative_error(found, expected) < 1e-4
            if not estimates:  # as if they had taken longer before
                for kind in session.kinds:
                    session.build_context.history.record_build(
                        machine_digest(kind.device), session.backend.name, kind.label, 60
                    )
            estimates.append(session.status().seconds_left)
    finally:
        torch.set_num_threads(threads)
        undo_compile(pipe)
    assert session.count("built") == len(session.kinds) > 2
    assert longest_pause_s < 1
    assert any(estimates)  # the status has said when
