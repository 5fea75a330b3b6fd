"""What passes as rounding: measured against float64, with a twin that measuring does not change."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tests.differential.registry import OPERATIONS
from tests.differential.rounding import TOLERANCES, allowed
from tests.differential.sequences import Driver

# What once could not be measured: it counted as no rounding at all, or changed the twin.
STEPS = (
    *("again", "lora_from_a_file", "stateful_processor_on", "forward_that_counts_on"),
    *("weight_made_under_inference_mode", "prompt_under_inference_mode", "autocast"),
)


@pytest.mark.parametrize("model", ["sd15", "qwen_image"])
def test_rounding_is_measured_and_the_twin_stays_as_it_was(model: str) -> None:
    driver = Driver(compiled=False, model=model)
    with driver._world(5) as (world, _):
        for name in STEPS:
            if name == "weight_made_under_inference_mode":
                OPERATIONS["lora_unload"].apply(world, Random(1))
            OPERATIONS[name].apply(world, Random(1))
            weights = list(world.twin_denoiser.parameters())
            counted = [counter[0] for counter in world.counters]
            theirs = world._outcome(world.twin)
            after = [counter[0] for counter in world.counters]
            assert isinstance(theirs, torch.Tensor), (name, theirs)
            exact = world._exact(counted)
            assert isinstance(exact, torch.Tensor), (name, exact)
            own = float((theirs - exact).norm() / exact.norm())
            assert 0 < own < (0.3 if name == "autocast" else 1e-4), name
            assert [counter[0] for counter in world.counters] == after
            assert not world.counters or after != counted
            now = world.twin_denoiser.parameters()
            assert all(a is b for a, b in zip(weights, now, strict=True))


def test_no_dtype_excuses_what_is_larger_than_its_limit() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert TOLERANCES["cpu", dtype] < allowed(dtype, 1.0) < 1
    assert allowed(torch.float64, 1.0) == 0


def test_an_error_that_is_no_rounding_is_found_in_16_bits() -> None:
    """A fault of a fifth of the picture, where bfloat16 rounds less."""
    driver = Driver(compiled=False, model="qwen_image", dtype=torch.bfloat16)
    with driver._world(5) as (world, mismatch):
        assert mismatch is None
        for name, weight in world.pipe.transformer.named_parameters():
            if "proj_out" in name and weight.ndim == 2:
                weight.data.mul_(0.8)
        found = world.compare()
    assert found is not None
    assert found.what == "picture"
    assert "own rounding" in found.text
