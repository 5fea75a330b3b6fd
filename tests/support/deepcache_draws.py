"""Latents of pipelines with DeepCache, and what it did for them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import StableDiffusionImg2ImgPipeline

from onediff_ext.engine.deepcache.deepcache_forward import DeepCache
from onediff_ext.hosts.diffusers.deepcache import deepcache_state


def state_of(pipe: Any) -> DeepCache:
    """The pipeline's DeepCache, which has to be there."""
    cache = deepcache_state(pipe)
    assert cache is not None
    return cache


def draw(pipe: Any, steps: int = 12, **options: Any) -> torch.Tensor:
    """Latents [1, 4, 9, 13] unless another size is given."""
    options = {"height": 72, "width": 104, **options}
    if isinstance(pipe, StableDiffusionImg2ImgPipeline):
        options = {k: v for k, v in options.items() if k not in ("height", "width")}
    with torch.no_grad():
        latents: torch.Tensor = pipe(
            prompt="a cat", negative_prompt="blurred", num_inference_steps=steps,
            generator=torch.Generator().manual_seed(0), output_type="latent", **options,
        ).images  # fmt: skip
    return latents


def counts(pipe: Any) -> dict[str, int]:
    return dict(state_of(pipe).counts)
