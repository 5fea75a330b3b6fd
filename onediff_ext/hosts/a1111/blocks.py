"""The blocks of CompVis' ``ldm`` and Stability's ``sgm`` models, as A1111 runs them.

Both packages name their classes alike, so each family here serves either; what the
two do differently is refused or traced as it stands. Up- and downsamplers stay
eager: each is one convolution, for which a graph has nothing to fuse.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.attention import attend, attend_image
from onediff_ext.engine.blocks.family import (
    IMAGE,
    VECTOR,
    BlockCall,
    BlockFamily,
    Refusal,
)
from onediff_ext.engine.blocks.group_norm_family import GroupNormFamily, GroupNorms
from onediff_ext.engine.blocks.transformer_family import TransformerBlocks

# Cross-attention of both packages; the second is the same with xformers' kernel.
_ATTENTION = frozenset({"CrossAttention", "MemoryEfficientCrossAttention"})
# A1111's own attentions, and the merging of its Lora extension.
_PATCHERS = ("ldm.", "sgm.", "modules.", "networks")


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


class _LdmFamily(BlockFamily):
    class_name: str
    module: str  # below the package, e.g. "modules.attention"

    def __init__(
        self,
        package: str,
        ignored_attrs: frozenset[str] = frozenset(),
        attention: AttentionSetting | None = None,
    ) -> None:
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
        self.label = self.class_name
        self.attention = attention or AttentionSetting()

    def block_class(self) -> type[nn.Module] | None:
        module = sys.modules.get(f"{self.package}.{self.module}")
        return getattr(module, self.class_name, None)

    def packages(self) -> Mapping[str, str]:
        return {}  # neither package has a version; the digest of the source stands for it


class ResBlockFamily(_LdmFamily):
    """The UNet's residual block, with a time embedding."""

    class_name = "ResBlock"
    module = "modules.diffusionmodules.openaimodel"

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.channels}→{block.out_channels}"

    def bind(
        self, block: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> BlockCall | Refusal:
        if len(args) != 2 or kwargs or not _tensors(args):
            return Refusal("called with arguments that are not known")
        if block.updown:
            return Refusal("a residual block that also resamples is not supported")
        # x [B, C, H, W], emb [B, T]
        return BlockCall((args[0], args[1]), (IMAGE, VECTOR))

    def run(
        self,
        block: Any,
        tensors: Sequence[torch.Tensor],
        statics: Mapping[str, Hashable],  # noqa: ARG002
    ) -> torch.Tensor:
        output: torch.Tensor = block._forward(tensors[0], tensors[1])
        return output

    def widest(self, block: Any, call: BlockCall) -> int:
        x = call.tensors[0]
        return x.numel() // x.shape[1] * int(max(block.channels, block.out_channels))


class TransformerFamily(TransformerBlocks, _LdmFamily):
    """BasicTransformerBlock with self-attention and cross-attention."""

    class_name = "BasicTransformerBlock"
    module = "modules.attention"

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.norm1.normalized_shape[0]}"

    def bind(
        self, block: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> BlockCall | Refusal:
        named = dict(zip(("x", "context"), args, strict=False))
        named.update(kwargs)
        if len(args) > 2 or named.keys() - {"x", "context"}:
            return Refusal("called with arguments that are not known")
        x, context = named.get("x"), named.get("context")
        if not isinstance(x, torch.Tensor) or not isinstance(context, torch.Tensor | None):
            return Refusal("called with arguments that are not known")
        for attention in (block.attn1, block.attn2):
            if type(attention).__name__ not in _ATTENTION:
                return Refusal(f"attention of class {type(attention).__name__} is not known")
        reason = self.attention.refusal_reason()
        if reason is not None:
            return Refusal(reason)
        ahead = not getattr(block, "disable_self_attn", False)
        return self.bound(x, context, ahead, ("upcast", self.attention.upcast()))

    def prepare(self, block: Any) -> None:
        # The host's own attention may slice by free memory, or cannot be traced at all.
        for module in block.modules():
            if type(module).__name__ in _ATTENTION:
                module.forward = partial(_attend, module)

    def call(
        self,
        block: Any,
        x: torch.Tensor,
        context: torch.Tensor | None,
        statics: Mapping[str, Hashable],
    ) -> torch.Tensor:
        for attention in (block.attn1, block.attn2):
            attention.forward.keywords["upcast"] = statics["upcast"]
        output: torch.Tensor = block._forward(x, context=context)
        return output


class VaeResnetFamily(_LdmFamily):
    """The VAE's residual block, without a time embedding."""

    class_name = "ResnetBlock"
    module = "modules.diffusionmodules.model"

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.in_channels}→{block.out_channels}"

    def bind(
        self,
        block: Any,  # noqa: ARG002
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> BlockCall | Refusal:
        named = dict(zip(("x", "temb"), args, strict=False))
        named.update(kwargs)
        if named.pop("temb", None) is not None or named.keys() != {"x"} or len(args) > 2:
            return Refusal("called with arguments that are not known")
        if not _tensors(named.values()):
            return Refusal("called with arguments that are not known")
        return BlockCall((named["x"],), (IMAGE,))  # x [B, C, H, W]

    def run(
        self,
        block: Any,
        tensors: Sequence[torch.Tensor],
        statics: Mapping[str, Hashable],  # noqa: ARG002
    ) -> torch.Tensor:
        output: torch.Tensor = block.forward(tensors[0], None)
        return output

    def widest(self, block: Any, call: BlockCall) -> int:
        x = call.tensors[0]
        return x.numel() // x.shape[1] * int(max(block.in_channels, block.out_channels))


class VaeAttentionFamily(_LdmFamily):
    """The single-head attention of the VAE's middle block, on images."""

    class_name = "AttnBlock"
    module = "modules.diffusionmodules.model"

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.in_channels}"

    def bind(
        self,
        block: Any,  # noqa: ARG002
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> BlockCall | Refusal:
        if len(args) != 1 or kwargs or not _tensors(args):
            return Refusal("called with arguments that are not known")
        # x [B, C, H, W]
        return BlockCall((args[0],), (IMAGE,), (("upcast", self.attention.upcast()),))

    def prepare(self, block: Any) -> None:
        block.forward = partial(attend_image, block)

    def run(
        self,
        block: Any,
        tensors: Sequence[torch.Tensor],
        statics: Mapping[str, Hashable],
    ) -> torch.Tensor:
        output: torch.Tensor = block.forward(tensors[0], upcast=statics["upcast"])
        return output


class GroupNorm32Family(GroupNorms, _LdmFamily):
    """The UNet's own GroupNorm, which computes in float32."""

    class_name = "GroupNorm32"
    module = "modules.diffusionmodules.util"

    def norm_class(self) -> type[nn.Module] | None:
        return _LdmFamily.block_class(self)


def ldm_families(
    ignored_attrs: frozenset[str] = frozenset(), attention: AttentionSetting | None = None
) -> tuple[BlockFamily, ...]:
    """The families of both packages.

    Args:
        transient: Attributes that the host keeps on layers for itself.
        attention: How the host wants attention computed.
    """
    classes: tuple[type[_LdmFamily], ...] = (
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


def _attend(
    attention: Any,
    x: torch.Tensor,
    context: torch.Tensor | None = None,
    *,
    upcast: bool = False,
    **extra: Any,
) -> torch.Tensor:
    """`attend`, for a forward that knows more arguments than it is given."""
    if any(extra.values()):
        raise NotImplementedError(f"attention with {', '.join(extra)}")
    return attend(attention, x, context, upcast=upcast)


def _tensors(values: Any) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)
