"""The adapter of reForge, which keeps Forge's structure over ComfyUI's models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.family import BlockFamily
from onediff_ext.engine.patches import Patches
from onediff_ext.hosts.forge.attention import reforge_attention
from onediff_ext.hosts.forge.packages import REFORGE
from onediff_ext.hosts.forge_blocks import forge_families
from onediff_ext.hosts.forge_host import ForgeFamilyHost


class ReForgeHost(ForgeFamilyHost):
    """reForge: several checkpoints may stay in memory, each a model object of its own.

    Where it offloads, it merges a LoRA at each call into the layers that it streams
    (`BlockFamily.weight_functions`).
    """

    name = "reforge"
    weight_functions = REFORGE.weight_functions

    def families(self) -> Sequence[BlockFamily]:
        return forge_families(REFORGE, reforge_attention())

    def load_model(self) -> None:
        from modules import sd_models

        sd_models.model_data.get_sd_model()

    def model_config(self, model: Any) -> object:
        return model.forge_objects.unet.model.model_config

    def applies_loras_online(self, unet: Any) -> bool:  # noqa: ARG002
        return False  # layer by layer, if at all

    def make_capturable(self, patches: Patches, unet: nn.Module) -> None:
        """Change nothing: reForge's UNet can be recorded as it is."""

    def memory_management(self) -> Any:
        from ldm_patched.modules import model_management

        return model_management

    def computation_dtype(self, unet: Any) -> torch.dtype:
        dtype: torch.dtype = unet.model.manual_cast_dtype or unet.model.get_dtype()
        return dtype
