"""The blocks of Forge's and Neo's ``backend.nn`` and of reForge's ``ldm_patched.ldm`` models.

All descend from CompVis' code through ComfyUI. Their blocks take a dict of
``transformer_options``, in which other extensions leave patches. A block that such a patch concerns
runs eager; for all others the dict changes nothing and is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
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
from onediff_ext.hosts.forge_attention import AttentionRules, inexact_reason
from onediff_ext.hosts.forge_weight_functions import LowVramPatches
from onediff_ext.hosts.ldm_blocks import (
    LdmBlocks,
    LdmResBlocks,
    LdmTransformers,
    LdmVaeAttention,
    LdmVaeResnets,
)
from onediff_ext.hosts.pinned_memory import PINNED_MEMORY

# Patches that run inside a transformer block; others run between blocks.
_INNER_PATCHES = (
    "attn1_patch",
    "attn1_output_patch",
    "middle_patch",
    "attn2_patch",
    "attn2_output_patch",
)
# The hosts' own token merging, by the module that its patches are written in.
_TOKEN_MERGING = ("backend.misc.tomesd", "ldm_patched.contrib.nodes_tomesd")


@dataclass(frozen=True)
class ForgePackage:
    """The blocks and layers of one of these hosts.

    Args:
        unet, transformer, vae: Python modules of ResBlock, BasicTransformerBlock and the
            VAE's blocks.
        layers: Full-name prefixes of the layer classes whose weights are plain tensors.
        casts: Attribute by which a layer is told to cast its weights to its input.
        ignored_attrs: Attributes that the host's memory management keeps on modules.
        dynamic_weight_attrs: Attributes that make a layer change its weights at each call.
        weight_functions: Know functions in `dynamic_weight_attrs`.
        copies_on_own_stream: Whether layers copy their weights on a stream of the host's (its swap
            method "Async").
        per_image: Models whose images of one batch do not depend on each other. reForge's UNet is
            none of them: it draws videos too.
    """

    unet: str
    transformer: str
    vae: str
    layers: tuple[str, ...]
    casts: str
    ignored_attrs: frozenset[str]
    dynamic_weight_attrs: tuple[str, ...]
    copies_on_own_stream: Callable[[], bool]
    per_image: tuple[str, ...]
    weight_functions: tuple[LowVramPatches, ...] = ()


def uses_backend_stream() -> bool:
    """Return whether Forge's or Neo's layers copy their weights on a stream of the host's."""
    stream = sys.modules.get("backend.stream")
    return bool(getattr(stream, "should_use_stream", bool)())


class ForgeBlocks(LdmBlocks):
    """Blocks of one of these hosts.

    Args:
        package: The host's.
        attention: How the host computes attention.
    """

    def __init__(self, package: ForgePackage, attention: AttentionRules) -> None:
        super().__init__()
        self.package, self.attention = package, attention
        own = (package.unet, package.transformer, package.vae)
        self.sources = (*dict.fromkeys(f"{module}." for module in own), *package.layers)
        self.ignored_attrs = package.ignored_attrs
        self.dynamic_weight_attrs = package.dynamic_weight_attrs
        self.weight_functions = package.weight_functions
        self.per_image = package.per_image

    def module_name(self) -> str:
        return self.package.unet

    def streams_weights(self) -> bool:
        return not self.package.copies_on_own_stream()

    def stays_pinned(self, weight: torch.Tensor) -> bool:
        return PINNED_MEMORY.holds(weight) and self.streams_weights()

    def prepare(self, block: Any) -> None:
        # Layers take weights of the input's dtype as they are, so the cast changes nothing for
        # them. For all others (fp8 storage) it becomes part of the graph. The hosts themselves
        # switch it on and off while they offload.
        for module in block.modules():
            cls = type(module)
            if f"{cls.__module__}.{cls.__qualname__}".startswith(self.package.layers):
                setattr(module, self.package.casts, True)


class ForgeResBlock(LdmResBlocks, ForgeBlocks):
    """The UNet's residual block."""

    arguments = ("x", "emb", "transformer_options")

    def eager_reason(self, block: Any, arguments: Arguments) -> str | None:
        if block.updown or block.skip_t_emb or block.exchange_temb_dims:
            return "a residual block of this form is not supported"
        if "group_norm_wrapper" in (arguments.get("transformer_options") or {}):
            return "another extension wraps the group norm"
        return None


class ForgeTransformer(LdmTransformers, ForgeBlocks):
    """The transformer block of all these hosts."""

    mutates_inputs = True  # Forge adds to x in place
    arguments = ("x", "context", "transformer_options")

    def module_name(self) -> str:
        return self.package.transformer

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.n_heads * block.d_head}"

    def sort(self, block: Any, arguments: Arguments) -> BlockCall | Refusal:
        x, context = arguments.get("x"), arguments.get("context")
        if not isinstance(x, torch.Tensor) or not isinstance(context, torch.Tensor | None):
            return UNKNOWN_ARGUMENTS
        options = arguments.get("transformer_options") or {}
        reason = _patch_reason(options) or self.attention.refusal_reason()
        if reason is not None:
            return Refusal(reason)
        wanted = getattr(block.attn1, "attn_precision", None)
        upcast = x.dtype != torch.float32 and self.attention.upcasts(wanted, x.dtype)
        ahead = not getattr(block, "disable_self_attn", False)
        return self.token_call(x, context, ahead, ("upcast", upcast))

    def forward(self, block: Any, x: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
        output: torch.Tensor = block.forward(x.clone(), context=context, transformer_options={})
        return output


class ForgeVaeResnet(LdmVaeResnets, ForgeBlocks):
    """The VAE's residual block."""

    def module_name(self) -> str:
        return self.package.vae


class ForgeVaeAttention(LdmVaeAttention, ForgeBlocks):
    """The VAE's attention."""

    def module_name(self) -> str:
        return self.package.vae

    def eager_reason(self, block: Any, arguments: Arguments) -> str | None:  # noqa: ARG002
        reason, chosen = self.attention.vae_refusal_reason(), vars(block).get("optimized_attention")
        if reason is not None or chosen is None:
            return reason
        home = sys.modules[self.package.vae]  # reForge keeps its choice on the block
        return inexact_reason(chosen, home, frozenset(vars(home)))


class ForgeGroupNorm(GroupNorms, ForgeBlocks):
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
        package: The host's.
        attention: How the host computes attention.
    """
    classes = (ForgeResBlock, ForgeTransformer, ForgeVaeResnet, ForgeVaeAttention)
    rules = attention or AttentionRules()
    return (
        *(family(package, rules) for family in classes),
        *(ForgeGroupNorm(package, rules, layers) for layers in package.layers),
        GroupNormFamily(package.ignored_attrs),
    )


def _patch_reason(options: Mapping[str, Any]) -> str | None:
    """Why the transformer block that runs next is eager: the patch that concerns it, or None."""
    patches = options.get("patches") or {}
    inner = [(name, patch) for name in _INNER_PATCHES for patch in patches.get(name) or ()]
    foreign = [name for name, patch in inner if not _is_token_merging(patch)]
    if foreign:
        return f"another extension patches the transformer ({foreign[0]})"
    if inner:
        return f"token merging patches the transformer ({inner[0][0]})"
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


def _is_token_merging(patch: object) -> bool:
    return getattr(patch, "__module__", None) in _TOKEN_MERGING
