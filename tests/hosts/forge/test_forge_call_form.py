"""A warm-up's calls have the form of those that Forge's and Neo's samplers make.

The forms were read in the running hosts: ``KModel.apply_model`` and ``calc_cond_uncond_batch``.
"""

from __future__ import annotations

import torch

from onediff_ext.hosts.forge_denoisers import as_in_sampling


def test_with_cfg_the_negative_prompt_comes_first() -> None:
    arguments = {
        "x": torch.zeros(4, 4, 8, 8),
        "timesteps": torch.full((4,), 500.0),
        "context": torch.zeros(4, 77, 24),
        "y": torch.zeros(4, 16),
    }
    args, kwargs = as_in_sampling(arguments, 2, {"patches": {}})
    assert args == (arguments["x"], arguments["timesteps"])
    assert list(kwargs) == ["context", "control", "transformer_options", "y"]
    options = kwargs["transformer_options"]
    assert list(options) == [
        *("patches", "cond_or_uncond", "sigmas", "cond_mark", "cond_indices", "uncond_indices")
    ]
    assert options["cond_or_uncond"] == [1, 0]
    assert (options["uncond_indices"], options["cond_indices"]) == ([0, 1], [2, 3])
    assert options["sigmas"].tolist() == [500.0, 500.0]
    assert options["cond_mark"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert options["cond_mark"].dtype == torch.float32


def test_without_cfg_there_is_the_prompt_alone() -> None:
    arguments = {
        "x": torch.zeros(1, 16, 8, 8),
        "timestep": torch.full((1,), 0.5),
        "context": torch.zeros(1, 256, 24),
    }
    _, kwargs = as_in_sampling(arguments, 1, {})
    assert kwargs["control"] is None
    options = kwargs["transformer_options"]
    assert options["cond_or_uncond"] == [0]
    assert (options["cond_indices"], options["uncond_indices"]) == ([0], [])
