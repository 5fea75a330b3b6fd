"""The blocks of Forge's ``backend.nn`` and of reForge's ``ldm_patched.ldm`` models.

Both descend from CompVis' code by way of ComfyUI: blocks take a dict of
``transformer_options``, in which other extensions leave patches. A block that such a
patch concerns runs eager; for all others the dict changes nothing and is left out.
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

_UNKNOWN = Refusal("called with arguments that are not known")

# Patches that run inside a transformer block; others run between blocks.
_INNER_PATCHES = (
    "attn1_patch",
    "attn1_output_patch",
    "middle_patch",
    "attn2_patch",
    "attn2_output_patch",
)


@dataclass(frozen=True)
class AttentionRules:
    """How the host computes attention, asked at each call.

    Args:
        refusal_reason: Why attention cannot be a graph's just now (an implementation that is not
            the host's own, or one that rounds differently), or None.
        upcasts: Whether scores are computed in float32, given the precision that the block
            was made with (None is the model's own) and the dtype of its input.
    """

    refusal_reason: Callable[[], str | None] = lambda: None
    upcasts: Callable[[torch.dtype | None, torch.dtype], bool] = lambda _wanted, _dtype: False


@dataclass(frozen=True)
class ForgePackage:
    """Where one of the two hosts keeps its blocks and layers.

    Args:
        unet, transformer, vae: Python modules of ResBlock, BasicTransformerBlock and the
            VAE's blocks.
        layers: Full-name prefixes of the layer classes whose weights are plain tensors.
        casts: Attribute by which a layer is told to cast its weights to its input.
        transient: What the host's memory management keeps on modules.
        interfering: What makes a layer change its weights at each call.
        per_image: Models whose images of one batch do not depend on each other. reForge's UNet is
            none: it draws videos too.
    """

    unet: str
    transformer: str
    vae: str
    layers: tuple[str, ...]
    casts: str
    ignored_attrs: frozenset[str]
    dynamic_weight_attrs: tuple[str, ...]
    per_image: tuple[str, ...]


FORGE = ForgePackage(
    unet="backend.nn.unet",
    transformer="backend.nn.unet",
    vae="backend.nn.vae",
    layers=("backend.operations.ForgeOperations.",),
    casts="parameters_manual_cast",
    ignored_attrs=frozenset(
        {
            "parameters_manual_cast",
            "prev_parameters_manual_cast",
            "total_mem",
            "weight_mem",
            "extra_mem",
            "forge_online_loras",
        }
    ),
    dynamic_weight_attrs=("forge_online_loras",),
    per_image=(
        "backend.nn.unet.IntegratedUNet2DConditionModel",
        "backend.nn.vae.Encoder",
        "backend.nn.vae.Decoder",
    ),
)

REFORGE = ForgePackage(
    unet="ldm_patched.ldm.modules.diffusionmodules.openaimodel",
    transformer="ldm_patched.ldm.modules.attention",
    vae="ldm_patched.ldm.modules.diffusionmodules.model",
    layers=(
        "ldm_patched.modules.ops.disable_weight_init.",
        "ldm_patched.modules.ops.manual_cast.",
    ),
    casts="ldm_patched_cast_weights",
    ignored_attrs=frozenset(
        {
            "ldm_patched_cast_weights",
            "prev_ldm_patched_cast_weights",
            "ldm_patched_patched_weights",
            "weight_function",
            "bias_function",
            "optimized_attention",
        }
    ),
    dynamic_weight_attrs=("weight_function", "bias_function"),
    per_image=(
        "ldm_patched.ldm.modules.diffusionmodules.model.Encoder",
        "ldm_patched.ldm.modules.diffusionmodules.model.Decoder",
    ),
)


class _ForgeFamily(BlockFamily):
    class_name: str

    def __init__(self, package: ForgePackage, attention: AttentionRules) -> None:
        self.package, self.attention = package, attention
        own = (package.unet, package.transformer, package.vae)
        self.sources = (*dict.fromkeys(f"{module}." for module in own), *package.layers)
        self.ignored_attrs, self.dynamic_weight_attrs = (
            package.ignored_attrs,
            package.dynamic_weight_attrs,
        )
        self.per_image = package.per_image
        self.label = self.class_name

    def module_name(self) -> str:
        return self.package.unet

    def block_class(self) -> type[nn.Module] | None:
        return getattr(sys.modules.get(self.module_name()), self.class_name, None)

    def packages(self) -> Mapping[str, str]:
        return {}  # neither host has a version; the digest of the source stands for it

    def prepare(self, block: Any) -> None:
        # Weights of the input's dtype are taken as they are, so this changes nothing for
        # them; for all others (fp8 storage) the cast becomes part of the graph. The hosts
        # themselves flip it while they offload.
        for module in block.modules():
            cls = type(module)
            if f"{cls.__module__}.{cls.__qualname__}".startswith(self.package.layers):
                setattr(module, self.package.casts, True)


class ForgeResBlock(_ForgeFamily):
    """The UNet's residual block, with a time embedding."""

    class_name = "ResBlock"

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.channels}→{block.out_channels}"

    def bind(
        self, block: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> BlockCall | Refusal:
        named = _named(("x", "emb", "transformer_options"), args, kwargs)
        if named is None or not _tensors(named.get("x"), named.get("emb")):
            return _UNKNOWN
        if block.updown or block.skip_t_emb or block.exchange_temb_dims:
            return Refusal("a residual block of this form is not supported")
        if "group_norm_wrapper" in (named.get("transformer_options") or {}):
            return Refusal("another extension wraps the group norm")
        # x [B, C, H, W], emb [B, T]
        return BlockCall((named["x"], named["emb"]), (IMAGE, VECTOR))

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


class ForgeTransformer(TransformerBlocks, _ForgeFamily):
    """BasicTransformerBlock with self-attention and cross-attention."""

    class_name = "BasicTransformerBlock"
    mutates_inputs = True  # Forge adds to x in place

    def module_name(self) -> str:
        return self.package.transformer

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.n_heads * block.d_head}"

    def bind(
        self, block: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> BlockCall | Refusal:
        named = _named(("x", "context", "transformer_options"), args, kwargs)
        if named is None or not _tensors(named.get("x")):
            return _UNKNOWN
        x, context = named["x"], named.get("context")
        if context is not None and not _tensors(context):
            return _UNKNOWN
        reason = _patched(named.get("transformer_options") or {}) or self.attention.refusal_reason()
        if reason is not None:
            return Refusal(reason)
        wanted = getattr(block.attn1, "attn_precision", None)
        upcast = x.dtype != torch.float32 and self.attention.upcasts(wanted, x.dtype)
        ahead = not getattr(block, "disable_self_attn", False)
        return self.bound(x, context, ahead, ("upcast", upcast))

    def prepare(self, block: Any) -> None:
        super().prepare(block)
        # The host's own attention may slice by free memory, or be a kernel of its own.
        for module in block.modules():
            if type(module).__name__ == "CrossAttention":
                module.forward = partial(_cross_attention, module)

    def call(
        self,
        block: Any,
        x: torch.Tensor,
        context: torch.Tensor | None,
        statics: Mapping[str, Hashable],
    ) -> torch.Tensor:
        for attention in (block.attn1, block.attn2):
            if attention is not None:
                attention.forward.keywords["upcast"] = statics["upcast"]
        output: torch.Tensor = block.forward(x.clone(), context=context, transformer_options={})
        return output


class _VaeFamily(_ForgeFamily):
    def module_name(self) -> str:
        return self.package.vae


class ForgeVaeResnet(_VaeFamily):
    """The VAE's residual block, without a time embedding."""

    class_name = "ResnetBlock"

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.in_channels}→{block.out_channels}"

    def bind(
        self,
        block: Any,  # noqa: ARG002
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> BlockCall | Refusal:
        named = _named(("x", "temb"), args, kwargs)
        if named is None or named.get("temb") is not None or not _tensors(named.get("x")):
            return _UNKNOWN
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


class ForgeVaeAttention(_VaeFamily):
    """The single-head attention of the VAE's middle block, on images."""

    class_name = "AttnBlock"

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.in_channels}"

    def bind(
        self,
        block: Any,  # noqa: ARG002
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> BlockCall | Refusal:
        named = _named(("x",), args, kwargs)
        if named is None or not _tensors(named.get("x")):
            return _UNKNOWN
        reason = self.attention.refusal_reason()
        return BlockCall((named["x"],), (IMAGE,)) if reason is None else Refusal(reason)

    def run(
        self,
        block: Any,
        tensors: Sequence[torch.Tensor],
        statics: Mapping[str, Hashable],  # noqa: ARG002
    ) -> torch.Tensor:
        return attend_image(block, tensors[0])


class ForgeGroupNorm(GroupNorms, _ForgeFamily):
    """GroupNorm as one of the host's layers.

    Args:
        package, attention: As all families have them.
        layers: One of the package's prefixes.
    """

    class_name = "GroupNorm"

    def __init__(self, package: ForgePackage, attention: AttentionRules, layers: str) -> None:
        super().__init__(package, attention)
        self._layers = layers.rstrip(".")

    def norm_class(self) -> type[nn.Module] | None:
        module, _, holder = self._layers.rpartition(".")
        return getattr(getattr(sys.modules.get(module), holder, None), self.class_name, None)


def forge_families(
    package: ForgePackage, attention: AttentionRules | None = None
) -> tuple[BlockFamily, ...]:
    """The families of one host.

    Args:
        package: `FORGE` or `REFORGE`.
        attention: How the host computes attention.
    """
    classes = (ForgeResBlock, ForgeTransformer, ForgeVaeResnet, ForgeVaeAttention)
    rules = attention or AttentionRules()
    return (
        *(family(package, rules) for family in classes),
        *(ForgeGroupNorm(package, rules, layers) for layers in package.layers),
        GroupNormFamily(package.ignored_attrs),
    )


def _cross_attention(
    attention: Any,
    x: torch.Tensor,
    context: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    transformer_options: object = None,  # noqa: ARG001
    *,
    upcast: bool = False,
) -> torch.Tensor:
    """CrossAttention's forward by PyTorch's own kernel, which leaves every size symbolic."""
    if value is not None or mask is not None:
        raise NotImplementedError("attention with values of their own or a mask")
    return attend(attention, x, context, upcast=upcast)


def _patched(options: Mapping[str, Any]) -> str | None:
    """Which patch concerns the transformer block that is about to run, or None."""
    patches = options.get("patches") or {}
    for name in _INNER_PATCHES:
        if patches.get(name):
            return f"another extension patches the transformer ({name})"
    replaced = options.get("patches_replace") or {}
    if not replaced:
        return None
    block = options.get("block")
    keys = [block]
    if block is not None:
        keys.append((block[0], block[1], options.get("block_index", 0)))
    for name in ("attn1", "attn2"):
        if any(key in replaced.get(name, ()) for key in keys):
            return f"another extension replaces attention ({name})"
    return None


def _named(
    order: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Arguments by name, or None when there are others."""
    if len(args) > len(order) or not kwargs.keys() <= set(order):
        return None
    return {**dict(zip(order, args, strict=False)), **kwargs}


def _tensors(*values: Any) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)
