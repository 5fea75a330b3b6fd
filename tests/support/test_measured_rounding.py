"""Rounding is measured on copies, and is what the dtype makes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from onediff_ext.session.session import Session
from tests.support.cuda_graph_steps import inputs
from tests.support.measured_rounding import rounding_of
from tests.support.models import sd15
from tests.support.session_fixtures import exports, open_session

__all__ = ["exports", "open_session"]


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [(torch.float64, 0, 1e-12), (torch.float32, 1e-8, 1e-5), (torch.bfloat16, 1e-3, 5e-2)],
    ids=str,
)
def test_rounding_is_that_of_the_dtype_and_the_model_stays(
    dtype: torch.dtype, least: float, most: float, open_session: Callable[..., Session]
) -> None:
    pipe = sd15(seed=3).to(dtype)
    arguments = inputs(pipe.unet, 8, 8)
    with torch.no_grad():
        before = pipe.unet(**arguments).sample
    compile_pipe(pipe, session=open_session(build="never"), ignores=["vae"])
    assert least <= rounding_of(pipe.unet, arguments) <= most
    assert {weight.dtype for weight in pipe.unet.parameters()} == {dtype}
    undo_compile(pipe)
    with torch.no_grad():
        assert pipe.unet(**arguments).sample.equal(before)
