"""The blocks of CompVis' ``ldm`` and Stability's ``sgm`` models, as A1111 runs them.

Both packages name their classes alike, so each family here serves either. Where the two differ,
a block is refused or traced as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.family import (
    UNKNOWN_ARGUMENTS,
    Arguments,
    BlockCall,
    BlockFamily,
    Refusal,
)
from onediff_ext.engine.blocks.group_norm_family import GroupNormFamily, GroupNorms
from onediff_ext.hosts.a1111 import lora
from onediff_ext.hosts.ldm_blocks import (
    LdmBlocks,
    LdmResBlocks,
    LdmTransformers,
    LdmVaeAttention,
    LdmVaeResnets,
)

# A1111's own attentions, and the merging of its Lora extension.
_PATCHERS = ("ldm.", "sgm.", "modules.", f"{lora.MODULE}.")


@dataclass(frozen=True)
class AttentionSetting:
    """How the host wants attention computed, asked at each call.

    Args:
        upcast: Whether queries, keys and values are computed in float32.
        refusal_reason: Why attention cannot be a graph's just now (a hypernetwork that changes
            the context, a foreign implementation), or None.
    """

    upcast: Callable[[], bool] = lambda: False
    refusal_reason: Callable[[], str | None] = lambda: None


class _A1111Blocks(LdmBlocks):
    module: str  # below the package, e.g. "modules.attention"

    def __init__(
        self,
        package: str,
        ignored_attrs: frozenset[str] = frozenset(),
        attention: AttentionSetting | None = None,
    ) -> None:
        super().__init__()
        self.package, self.ignored_attrs = package, ignored_attrs
        # A1111 has its UNets' forward look whether another UNet is chosen.
        self.sources = (f"{package}.modules.", "modules.sd_unet.")
        models = f"{package}.modules.diffusionmodules"
        self.per_image = (
            f"{models}.openaimodel.UNetModel",
            f"{models}.model.Encoder",
            f"{models}.model.Decoder",
        )
        self.trusted_patchers = _PATCHERS
        self.attention = attention or AttentionSetting()

    def module_name(self) -> str:
        return f"{self.package}.{self.module}"


class ResBlockFamily(LdmResBlocks, _A1111Blocks):
    """The UNet's residual block."""

    module = "modules.diffusionmodules.openaimodel"

    def eager_reason(self, block: Any, arguments: Arguments) -> str | None:  # noqa: ARG002
        return "a residual block that also resamples is not supported" if block.updown else None


class TransformerFamily(LdmTransformers, _A1111Blocks):
    """The transformer block of both packages."""

    module = "modules.attention"
    arguments = ("x", "context")
    # The second is the same with xformers' kernel.
    attention_classes = frozenset({"CrossAttention", "MemoryEfficientCrossAttention"})

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.norm1.normalized_shape[0]}"

    def sort(self, block: Any, arguments: Arguments) -> BlockCall | Refusal:
        x, context = arguments.get("x"), arguments.get("context")
        if not isinstance(x, torch.Tensor) or not isinstance(context, torch.Tensor | None):
            return UNKNOWN_ARGUMENTS
        for attention in (block.attn1, block.attn2):
            if type(attention).__name__ not in self.attention_classes:
                return Refusal(f"attention of class {type(attention).__name__} is not known")
        reason = self.attention.refusal_reason()
        if reason is not None:
            return Refusal(reason)
        ahead = not getattr(block, "disable_self_attn", False)
        return self.token_call(x, context, ahead, ("upcast", self.attention.upcast()))

    def forward(self, block: Any, x: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
        output: torch.Tensor = block._forward(x, context=context)
        return output


class VaeResnetFamily(LdmVaeResnets, _A1111Blocks):
    """The VAE's residual block."""

    module = "modules.diffusionmodules.model"


class VaeAttentionFamily(LdmVaeAttention, _A1111Blocks):
    """The VAE's attention."""

    module = "modules.diffusionmodules.model"

    def image_statics(self) -> tuple[tuple[str, Hashable], ...]:
        return (("upcast", self.attention.upcast()),)


class GroupNorm32Family(GroupNorms, _A1111Blocks):
    """The UNet's own GroupNorm, which computes in float32."""

    class_name = "GroupNorm32"
    module = "modules.diffusionmodules.util"

    def norm_class(self) -> type[nn.Module] | None:
        return _A1111Blocks.block_class(self)


def ldm_families(
    ignored_attrs: frozenset[str] = frozenset(), attention: AttentionSetting | None = None
) -> tuple[BlockFamily, ...]:
    """The families of both packages.

    Args:
        ignored_attrs: Attributes that the host keeps on layers for itself.
        attention: How the host wants attention computed.
    """
    classes: tuple[type[_A1111Blocks], ...] = (
        ResBlockFamily,
        TransformerFamily,
        VaeResnetFamily,
        VaeAttentionFamily,
        GroupNorm32Family,
    )
    families = (
        family(package, ignored_attrs, attention)
        for package in ("ldm", "sgm")
        for family in classes
    )
    return (*families, GroupNormFamily(ignored_attrs, _PATCHERS))
