"""The base of the families of diffusers' blocks."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn

from onediff_ext.engine.blocks.family import BlockFamily

# What the names of diffusers' hooks start with, and the step cache that they belong to.
_STEP_CACHES = {
    "fbc_": "FirstBlockCache",
    "mag_cache_": "MagCache",
    "taylorseer_": "TaylorSeer",
    "faster_cache_": "FasterCache",
    "pyramid_attention_broadcast": "PyramidAttentionBroadcast",
}


class DiffusersBlocks(BlockFamily):
    """Blocks of a class of diffusers.

    Attributes:
        path: ``"package.module:Class"``.
    """

    path: str
    sources = ("diffusers.",)
    redundant_attrs = frozenset(
        {
            "_chunk_dim",
            "_from_deprecated_attn_block",
            "_gradient_checkpointing_func",
            "_internal_dict",
        }
    )
    per_image = (
        "diffusers.models.unets.unet_2d_condition.UNet2DConditionModel",
        "diffusers.models.controlnets.controlnet.ControlNetModel",
        "diffusers.models.transformers.transformer_sd3.SD3Transformer2DModel",
        "diffusers.models.autoencoders.vae.Encoder",
        "diffusers.models.autoencoders.vae.Decoder",
    )

    def block_class(self) -> type[nn.Module] | None:
        module, name = self.path.split(":")
        return getattr(sys.modules.get(module), name, None)  # no block without its module

    def packages(self) -> Mapping[str, str]:
        return {"diffusers": _diffusers_version()}

    def patched_by(self, module: nn.Module) -> str | None:
        registry: Any = getattr(module, "_diffusers_hook", None)
        for hook in getattr(registry, "hooks", ()):
            for start, name in _STEP_CACHES.items():
                if hook.startswith(start):
                    return f"the step cache {name}"
        return None


@cache
def _diffusers_version() -> str:
    return importlib.metadata.version("diffusers")  # reads and parses a file at each call
