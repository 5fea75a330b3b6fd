"""The same latents as the reference implementation, DeepCache 0.1.1, at the same settings."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from onediff_ext.hosts.diffusers.deepcache import deepcache_state, enable_deepcache
from tests.support.deepcache_draws import draw
from tests.support.deepcache_golden import CASES, GOLDEN, Case, draw_golden, golden_pipe


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference_implementation(case: Case):
    expected = load_file(GOLDEN)[case.name]
    pipe = enable_deepcache(golden_pipe(case.model), f"{case.interval} depth={case.branch}")
    latents = draw_golden(pipe)
    state = deepcache_state(pipe)
    assert state is not None
    assert state.counts["full"] == -(-12 // case.interval)
    torch.testing.assert_close(latents, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("model", ["sd15", "sd2", "sdxl"])
def test_interval_one_is_no_deepcache_bit_for_bit(model: str):
    pipe = golden_pipe(model).to(dtype=torch.float32)
    expected = draw(pipe)
    assert torch.equal(draw(enable_deepcache(pipe, 1)), expected)
    # A picture with DeepCache in between leaves nothing behind.
    assert not torch.equal(draw(enable_deepcache(pipe, 3)), expected)
    assert torch.equal(draw(enable_deepcache(pipe, 1)), expected)
