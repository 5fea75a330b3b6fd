"""The adapter of Neo, which keeps Forge's structure over newer memory management."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.core.components import ComponentId
from onediff_ext.engine.blocks.family import BlockFamily
from onediff_ext.engine.patches import Patches
from onediff_ext.hosts.forge_blocks import forge_families
from onediff_ext.hosts.forge_host import ForgeFamilyHost, forge_objects
from onediff_ext.hosts.forge_token_blocks import token_families
from onediff_ext.hosts.neo.attention import neo_attention
from onediff_ext.hosts.neo.denoisers import NEO_DENOISERS
from onediff_ext.hosts.neo.eager_reasons import eager_reason
from onediff_ext.hosts.neo.package import NEO
from onediff_ext.hosts.neo.token_blocks import NEO_TOKEN_BLOCKS
from onediff_ext.hosts.neo.weight_loads import WeightLoads

_STEPS = 20  # of the pictures for which a warm-up prepares: the host's own default
_KNOWN_VAE = "IntegratedAutoencoderKL"


class NeoHost(ForgeFamilyHost):
    """Neo: as Forge, with transformers, a compiler of its own, and a refiner without a load."""

    name = "neo"
    denoisers = NEO_DENOISERS
    weight_functions = NEO.weight_functions

    def __init__(self) -> None:
        super().__init__()
        self._weight_loads = WeightLoads()

    def families(self) -> Sequence[BlockFamily]:
        attention = neo_attention()
        return (
            *forge_families(NEO, attention),
            *token_families(NEO_TOKEN_BLOCKS, NEO, attention),
        )

    def refusal_reason(self, job: Any) -> str | None:
        from backend.args import dynamic_args

        objects = forge_objects(self.loaded_model())
        if objects is None:
            return None  # the host loads one before it samples
        return eager_reason(objects.unet.model, dynamic_args) or super().refusal_reason(job)

    def attach(self, patches: Patches, model: nn.Module, component: ComponentId) -> None:
        super().attach(patches, model, component)
        if component.role.is_denoiser:
            self._weight_loads.watch(patches)

    def applies_loras_online(self, unet: Any) -> bool:  # noqa: ARG002
        return False  # layer by layer, and the layers' functions are known

    def state(self) -> Hashable:
        return self._weight_loads.count

    def transformer_options(self, unet: Any) -> Mapping[str, Any]:
        sigmas = torch.linspace(1, 0, _STEPS + 1, device=unet.load_device)
        return {"sampling_sigmas": sigmas, **super().transformer_options(unet)}

    def vae_step(self) -> None:
        objects = forge_objects(self.loaded_model())
        # Other VAEs take videos, or latents of another scale; no block of theirs is known.
        if objects is not None and type(objects.vae.first_stage_model).__name__ == _KNOWN_VAE:
            super().vae_step()
