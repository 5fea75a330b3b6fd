"""The blocks of diffusers' UNet2DConditionModel, ControlNetModel and AutoencoderKL.

Down- and upsamplers stay eager: each is one convolution, for which a graph has
nothing to fuse. A transformer's projections are kinds of their own, since its many
blocks in one graph would take minutes to build.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.family import (
    IMAGE,
    VECTOR,
    BlockCall,
    BlockFamily,
    Refusal,
)
from onediff_ext.engine.blocks.group_norm_family import GroupNormFamily, small_blocks_pay
from onediff_ext.engine.blocks.transformer_family import TransformerBlocks

# Attention that is a pure function of its arguments, by its class's name there. Others
# (IP-Adapter, attention stores, slicing, xformers) keep state or freeze shapes.
_PROCESSORS = "diffusers.models.attention_processor"
PURE_PROCESSORS = frozenset({"AttnProcessor", "AttnProcessor2_0", "FusedAttnProcessor2_0"})


class _DiffusersFamily(BlockFamily):
    path: str  # "package.module:Class"
    sources = ("diffusers.",)
    per_image = (
        "diffusers.models.unets.unet_2d_condition.UNet2DConditionModel",
        "diffusers.models.controlnets.controlnet.ControlNetModel",
        "diffusers.models.autoencoders.vae.Encoder",
        "diffusers.models.autoencoders.vae.Decoder",
    )

    def block_class(self) -> type[nn.Module] | None:
        if "diffusers" not in sys.modules:
            return None
        module, name = self.path.split(":")
        return getattr(importlib.import_module(module), name, None)

    def packages(self) -> Mapping[str, str]:
        return {"diffusers": _diffusers_version()}


class ResnetFamily(_DiffusersFamily):
    """ResnetBlock2D, with a time embedding (UNet) or without one (VAE)."""

    label = "ResnetBlock2D"
    path = "diffusers.models.resnet:ResnetBlock2D"

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.in_channels}→{block.out_channels}"

    def bind(
        self, block: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> BlockCall | Refusal:
        named = _named(("input_tensor", "temb"), args, kwargs)
        if named is None or named.get("input_tensor") is None:
            return Refusal("called with arguments that are not known")
        if block.upsample is not None or block.downsample is not None:
            return Refusal("a residual block that also resamples is not supported")
        # x [B, C, H, W], temb [B, T] or None
        if named.get("temb") is None:
            return BlockCall((named["input_tensor"],), (IMAGE,), (("temb", False),))
        return BlockCall((named["input_tensor"], named["temb"]), (IMAGE, VECTOR), (("temb", True),))

    def run(
        self,
        block: Any,
        tensors: Sequence[torch.Tensor],
        statics: Mapping[str, Hashable],
    ) -> torch.Tensor:
        output: torch.Tensor = block.forward(tensors[0], tensors[1] if statics["temb"] else None)
        return output

    def widest(self, block: Any, call: BlockCall) -> int:
        x = call.tensors[0]
        return x.numel() // x.shape[1] * int(max(block.in_channels, block.out_channels))


class TransformerFamily(TransformerBlocks, _DiffusersFamily):
    """BasicTransformerBlock with self-attention and cross-attention."""

    label = "BasicTransformerBlock"
    path = "diffusers.models.attention:BasicTransformerBlock"
    unsupported = (
        "attention_mask",
        "encoder_attention_mask",
        "timestep",
        "class_labels",
        "added_cond_kwargs",
    )

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.dim}"

    def bind(
        self, block: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> BlockCall | Refusal:
        order = (
            "hidden_states",
            "attention_mask",
            "encoder_hidden_states",
            "encoder_attention_mask",
            "timestep",
            "cross_attention_kwargs",
            "class_labels",
            "added_cond_kwargs",
        )
        named = _named(order, args, kwargs)
        if named is None or named.get("hidden_states") is None:
            return Refusal("called with arguments that are not known")
        if block.norm_type == "layer_norm":
            # UNets hand the timestep to every transformer; plain layer norms ignore it.
            named.pop("timestep", None)
            named.pop("class_labels", None)
            named.pop("added_cond_kwargs", None)
        else:
            return Refusal(f"norm type {block.norm_type} is not supported")
        for name in self.unsupported:
            if named.get(name) is not None:
                return Refusal(f"called with {name}")
        if named.get("cross_attention_kwargs"):
            return Refusal("called with cross_attention_kwargs")
        if block._chunk_size is not None:
            return Refusal("feed-forward chunking is on")
        for attention in (block.attn1, block.attn2):
            reason = _processor_refusal(attention)
            if reason is not None:
                return Refusal(reason)
        context = named.get("encoder_hidden_states")
        if isinstance(context, tuple):
            return Refusal("IP-Adapter embeddings among the context")
        return self.bound(named["hidden_states"], context, _projects_alone(block))

    def call(
        self,
        block: Any,
        x: torch.Tensor,
        context: torch.Tensor | None,
        statics: Mapping[str, Hashable],  # noqa: ARG002
    ) -> torch.Tensor:
        output: torch.Tensor = block.forward(x, encoder_hidden_states=context)
        return output


class AttentionFamily(_DiffusersFamily):
    """The single-head attention of the VAE's middle block, on images."""

    label = "Attention"
    path = "diffusers.models.attention_processor:Attention"

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.query_dim}"

    def bind(
        self, block: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> BlockCall | Refusal:
        order = ("hidden_states", "encoder_hidden_states", "attention_mask")
        named = _named((*order, "temb"), args, kwargs)
        if named is None or named.get("hidden_states") is None or named["hidden_states"].ndim != 4:
            return Refusal("attention outside a VAE's middle block runs inside its transformer")
        if named.get("encoder_hidden_states") is not None:
            return Refusal("called with encoder_hidden_states")
        if named.get("attention_mask") is not None or named.get("temb") is not None:
            return Refusal("called with a mask or a time embedding")
        reason = _processor_refusal(block)
        if reason is not None:
            return Refusal(reason)
        return BlockCall((named["hidden_states"],), (IMAGE,))  # x [B, C, H, W]

    def run(
        self,
        block: Any,
        tensors: Sequence[torch.Tensor],
        statics: Mapping[str, Hashable],  # noqa: ARG002
    ) -> torch.Tensor:
        output: torch.Tensor = block.forward(tensors[0])
        return output


class _ProjectionFamily(_DiffusersFamily):
    path = "diffusers.models.transformers.transformer_2d:Transformer2DModel"

    def block_class(self) -> type[nn.Module] | None:
        return super().block_class() if small_blocks_pay() else None

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.in_channels}"


class ProjectionInFamily(_ProjectionFamily):
    """From an image to a transformer's tokens: norm, layout and projection."""

    label = "Transformer2DModel in"
    method = "_operate_on_continuous_inputs"
    parts = ("norm", "proj_in")

    def bind(
        self,
        block: Any,  # noqa: ARG002
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> BlockCall | Refusal:
        named = _named(("hidden_states",), args, kwargs)
        if named is None or named.get("hidden_states") is None:
            return Refusal("called with arguments that are not known")
        return BlockCall((named["hidden_states"],), (IMAGE,))  # x [B, C, H, W]

    def run(
        self,
        block: Any,
        tensors: Sequence[torch.Tensor],
        statics: Mapping[str, Hashable],  # noqa: ARG002
    ) -> torch.Tensor:
        return self.tensor_of(block._operate_on_continuous_inputs(tensors[0]))

    def tensor_of(self, output: Any) -> torch.Tensor:
        tensor: torch.Tensor = output[0]
        return tensor

    def output_of(self, block: Any, tensor: torch.Tensor) -> Any:
        # The channels before a linear projection, and after one that is a convolution.
        return tensor, block.in_channels if block.use_linear_projection else tensor.shape[-1]


class ProjectionOutFamily(_ProjectionFamily):
    """From a transformer's tokens back to an image, and the sum with what came in."""

    label = "Transformer2DModel out"
    method = "_get_output_for_continuous_inputs"
    parts = ("proj_out",)

    def bind(
        self,
        block: Any,  # noqa: ARG002
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> BlockCall | Refusal:
        order = ("hidden_states", "residual", "batch_size", "height", "width", "inner_dim")
        named = _named(order, args, kwargs)
        if named is None or len(named) != len(order):
            return Refusal("called with arguments that are not known")
        tokens, residual = named["hidden_states"], named["residual"]
        batch, _, height, width = residual.shape
        if tokens.ndim != 3 or tokens.shape[:2] != (batch, height * width):
            return Refusal("tokens that are not those of the image")
        # tokens [B, H*W, D] as an image [B, D, H, W] in NHWC order, residual [B, C, H, W]
        image = tokens.unflatten(1, (height, width)).permute(0, 3, 1, 2)
        return BlockCall((image, residual), (IMAGE, IMAGE))

    def run(
        self,
        block: Any,
        tensors: Sequence[torch.Tensor],
        statics: Mapping[str, Hashable],  # noqa: ARG002
    ) -> torch.Tensor:
        image, residual = tensors
        batch, width_inner, height, width = image.shape
        tokens = image.permute(0, 2, 3, 1).reshape(batch, height * width, width_inner)
        output: torch.Tensor = block._get_output_for_continuous_inputs(
            hidden_states=tokens,
            residual=residual,
            batch_size=batch,
            height=height,
            width=width,
            # Counted after a linear projection, and before one that is a convolution.
            inner_dim=residual.shape[1] if block.use_linear_projection else width_inner,
        )
        # In the layout that the next block wants, whatever the sum was computed in.
        return output.contiguous(memory_format=torch.channels_last)


DIFFUSERS_FAMILIES: tuple[BlockFamily, ...] = (
    ResnetFamily(),
    TransformerFamily(),
    AttentionFamily(),
    ProjectionInFamily(),
    ProjectionOutFamily(),
    GroupNormFamily(),
)


@cache
def _diffusers_version() -> str:
    return importlib.metadata.version("diffusers")  # reads and parses a file at each call


def _named(
    order: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Arguments by name, or None when some are not among `order`."""
    if len(args) > len(order):
        return None
    named = dict(zip(order, args, strict=False))
    for name, value in kwargs.items():
        if name not in order or name in named:
            if value is None:
                continue
            return None
        named[name] = value
    return named


def _projects_alone(block: Any) -> bool:
    """Whether nothing but ``attn2.to_k`` and ``attn2.to_v`` reads the context."""
    attention = block.attn2
    return (
        attention is not None
        and attention.norm_cross is None
        and not getattr(attention, "fused_projections", False)
        and not block.only_cross_attention
    )


def _processor_refusal(attention: Any) -> str | None:
    if attention is None:
        return None
    processor = attention.processor
    cls = type(processor)
    if cls.__name__ in PURE_PROCESSORS and cls.__module__ == _PROCESSORS:
        # Another name for the same thing would be a setting that no graph knows.
        return f"attention processor {cls.__name__} has settings" if vars(processor) else None
    return f"attention processor {cls.__qualname__} is not known as pure"
