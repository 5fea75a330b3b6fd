"""DeepCache with CUDA graphs on a real GPU, in a model that moves between pictures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from onediff_ext.hosts.diffusers.deepcache import disable_deepcache, enable_deepcache
from tests.support import models
from tests.support.deepcache_draws import counts, draw
from tests.support.draw import relative_error

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def full_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("first", ["offload", "compile"])
def test_cuda_graphs_of_a_model_that_is_offloaded(first: str, make_session: Any) -> None:
    """`enable_model_cpu_offload` moves the UNet to the GPU and back with each picture."""
    plain, reference = models.sd15().to("cuda"), enable_deepcache(models.sd15().to("cuda"), 3)
    session, pipe = make_session(), models.sd15()
    if first == "offload":
        pipe.enable_model_cpu_offload()
    compile_pipe(pipe, session=session, ignores=["vae"])
    if first == "compile":
        pipe.enable_model_cpu_offload()
    enable_deepcache(pipe, 3)
    for height in (72, 64, 72, 72, 64):
        found, expected = draw(pipe, height=height), draw(reference, height=height)
        assert relative_error(found, expected) < 1e-5
        assert relative_error(found, draw(plain, height=height)) > 1e-4
    assert counts(pipe)["shallow"] > 0
    assert session.cuda_graphs.made > 0
    disable_deepcache(pipe)
    for height in (72, 64, 72):
        assert relative_error(draw(pipe, height=height), draw(plain, height=height)) < 1e-5
    undo_compile(pipe)
    session.close()
