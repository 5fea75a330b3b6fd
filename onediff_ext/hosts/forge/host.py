"""The adapter of Forge."""

from __future__ import annotations

from collections.abc import Sequence

from onediff_ext.engine.blocks.family import BlockFamily
from onediff_ext.hosts.forge.attention import forge_attention
from onediff_ext.hosts.forge.packages import FORGE
from onediff_ext.hosts.forge_blocks import forge_families
from onediff_ext.hosts.forge_denoisers import FORGE_DENOISERS
from onediff_ext.hosts.forge_host import ForgeFamilyHost
from onediff_ext.hosts.forge_token_blocks import FORGE_TOKEN_BLOCKS, token_families


class ForgeHost(ForgeFamilyHost):
    """Forge: each checkpoint is a new model object, loaded when it is first needed."""

    name = "forge"
    denoisers = FORGE_DENOISERS

    def families(self) -> Sequence[BlockFamily]:
        attention = forge_attention()
        return (
            *forge_families(FORGE, attention),
            *token_families(FORGE_TOKEN_BLOCKS, FORGE, attention),
        )
