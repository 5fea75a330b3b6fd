"""The blocks of diffusers' UNet2DConditionModel, ControlNetModel and AutoencoderKL.

Down- and upsamplers stay eager: each is one convolution, for which a graph has nothing to fuse. A
transformer's projections are kinds of their own: one graph of all its blocks would take minutes to
build.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.family import (
    IMAGE,
    UNKNOWN_ARGUMENTS,
    VECTOR,
    Arguments,
    BlockCall,
    BlockFamily,
    Refusal,
    Statics,
    Tensors,
)
from onediff_ext.engine.blocks.group_norm_family import GroupNormFamily, small_blocks_pay
from onediff_ext.engine.blocks.image_family import ImageBlocks
from onediff_ext.engine.blocks.residual_family import ResidualBlocks
from onediff_ext.engine.blocks.transformer_family import TransformerBlocks
from onediff_ext.hosts.diffusers.attention_processors import processor_eager_reason
from onediff_ext.hosts.diffusers.block_base import DiffusersBlocks
from onediff_ext.hosts.diffusers.token_blocks import TOKEN_FAMILIES

# Processors that are pure functions of their arguments. Others (IP-Adapter, attention stores,
# slicing, xformers) keep state or freeze shapes.
_PROCESSORS = "diffusers.models.attention_processor"
PURE_PROCESSORS = frozenset(
    f"{_PROCESSORS}.{name}"
    for name in ("AttnProcessor", "AttnProcessor2_0", "FusedAttnProcessor2_0")
)


class ResnetFamily(ResidualBlocks, DiffusersBlocks):
    """ResnetBlock2D, with a time embedding (UNet) or without one (VAE)."""

    label = "ResnetBlock2D"
    path = "diffusers.models.resnet:ResnetBlock2D"
    arguments = ("input_tensor", "temb")

    def channels(self, block: Any) -> tuple[int, int]:
        return block.in_channels, block.out_channels

    def sort(self, block: Any, arguments: Arguments) -> BlockCall | Refusal:
        x, temb = arguments.get("input_tensor"), arguments.get("temb")
        if x is None:
            return UNKNOWN_ARGUMENTS
        if block.upsample is not None or block.downsample is not None:
            return Refusal("a residual block that also resamples is not supported")
        # x [B, C, H, W], temb [B, T] or None
        if temb is None:
            return BlockCall((x,), (IMAGE,), (("temb", False),))
        return BlockCall((x, temb), (IMAGE, VECTOR), (("temb", True),))

    def run(self, block: Any, tensors: Tensors, statics: Statics) -> torch.Tensor:
        output: torch.Tensor = block.forward(tensors[0], tensors[1] if statics["temb"] else None)
        return output


class TransformerFamily(TransformerBlocks, DiffusersBlocks):
    """BasicTransformerBlock with self-attention and cross-attention."""

    label = "BasicTransformerBlock"
    path = "diffusers.models.attention:BasicTransformerBlock"
    arguments = (
        "hidden_states",
        "attention_mask",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "timestep",
        "cross_attention_kwargs",
        "class_labels",
        "added_cond_kwargs",
    )

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.dim}"

    def sort(self, block: Any, arguments: Arguments) -> BlockCall | Refusal:
        x, context = arguments.get("hidden_states"), arguments.get("encoder_hidden_states")
        if x is None:
            return UNKNOWN_ARGUMENTS
        if block.norm_type != "layer_norm":
            return Refusal(f"norm type {block.norm_type} is not supported")
        # UNets pass the timestep, class_labels and added_cond_kwargs to every transformer; plain
        # layer norms ignore them.
        for name in ("attention_mask", "encoder_attention_mask"):
            if arguments.get(name) is not None:
                return Refusal(f"called with {name}")
        if arguments.get("cross_attention_kwargs"):
            return Refusal("called with cross_attention_kwargs")
        if block._chunk_size is not None:
            return Refusal("feed-forward chunking is on")
        for attention in (block.attn1, block.attn2):
            reason = processor_eager_reason(attention, PURE_PROCESSORS)
            if reason is not None:
                return Refusal(reason)
        if isinstance(context, tuple):
            return Refusal("IP-Adapter embeddings among the context")
        return self.token_call(x, context, _projects_alone(block))

    def call(
        self,
        block: Any,
        x: torch.Tensor,
        context: torch.Tensor | None,
        statics: Statics,  # noqa: ARG002
    ) -> torch.Tensor:
        output: torch.Tensor = block.forward(x, encoder_hidden_states=context)
        return output


class AttentionFamily(ImageBlocks, DiffusersBlocks):
    """The single-head attention of the VAE's middle block, on images."""

    label = "Attention"
    path = "diffusers.models.attention_processor:Attention"
    arguments = ("hidden_states", "encoder_hidden_states", "attention_mask", "temb")
    no_image = Refusal("no graphs are known for the block of this attention")

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.query_dim}"

    def eager_reason(self, block: Any, arguments: Arguments) -> str | None:
        for name in self.arguments[1:]:
            if arguments.get(name) is not None:
                return f"called with {name}"
        return processor_eager_reason(block, PURE_PROCESSORS)


class _ProjectionFamily(DiffusersBlocks):
    path = "diffusers.models.transformers.transformer_2d:Transformer2DModel"

    def block_class(self) -> type[nn.Module] | None:
        return super().block_class() if small_blocks_pay() else None

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.in_channels}"


class ProjectionInFamily(ImageBlocks, _ProjectionFamily):
    """From an image to a transformer's tokens: norm, projection and layout."""

    label = "Transformer2DModel in"
    method = "_operate_on_continuous_inputs"
    arguments = ("hidden_states",)
    parts = ("norm", "proj_in")

    def run(self, block: Any, tensors: Tensors, statics: Statics) -> Any:  # noqa: ARG002
        return block._operate_on_continuous_inputs(tensors[0])

    def tensors_of(self, output: Any) -> tuple[torch.Tensor, ...]:
        tensor: torch.Tensor = output[0]
        return (tensor,)

    def output_of(self, block: Any, tensors: Tensors) -> Any:
        (tensor,) = tensors
        # diffusers counts the channels before a linear projection, and after a convolution.
        return tensor, block.in_channels if block.use_linear_projection else tensor.shape[-1]


class ProjectionOutFamily(_ProjectionFamily):
    """From a transformer's tokens back to an image, with the residual added."""

    label = "Transformer2DModel out"
    method = "_get_output_for_continuous_inputs"
    arguments = ("hidden_states", "residual", "batch_size", "height", "width", "inner_dim")
    parts = ("proj_out",)

    def sort(self, block: Any, arguments: Arguments) -> BlockCall | Refusal:  # noqa: ARG002
        if len(arguments) != len(self.arguments):
            return UNKNOWN_ARGUMENTS
        tokens, residual = arguments["hidden_states"], arguments["residual"]
        batch, _, height, width = residual.shape
        if tokens.ndim != 3 or tokens.shape[:2] != (batch, height * width):
            return Refusal("tokens that are not those of the image")
        # tokens [B, H*W, D] as an image [B, D, H, W] in NHWC order, residual [B, C, H, W]
        image = tokens.unflatten(1, (height, width)).permute(0, 3, 1, 2)
        return BlockCall((image, residual), (IMAGE, IMAGE))

    def run(self, block: Any, tensors: Tensors, statics: Statics) -> torch.Tensor:  # noqa: ARG002
        image, residual = tensors
        batch, width_inner, height, width = image.shape
        tokens = image.permute(0, 2, 3, 1).reshape(batch, height * width, width_inner)
        output: torch.Tensor = block._get_output_for_continuous_inputs(
            hidden_states=tokens,
            residual=residual,
            batch_size=batch,
            height=height,
            width=width,
            # diffusers counts after a linear projection, and before a convolution.
            inner_dim=residual.shape[1] if block.use_linear_projection else width_inner,
        )
        # The layout that the next block takes, whatever layout the sum has.
        return output.contiguous(memory_format=torch.channels_last)


DIFFUSERS_FAMILIES: tuple[BlockFamily, ...] = (
    ResnetFamily(),
    TransformerFamily(),
    AttentionFamily(),
    ProjectionInFamily(),
    ProjectionOutFamily(),
    GroupNormFamily(),
    *TOKEN_FAMILIES,
)


def _projects_alone(block: Any) -> bool:
    """Whether nothing but ``attn2.to_k`` and ``attn2.to_v`` reads the context."""
    attention = block.attn2
    return (
        attention is not None
        and attention.norm_cross is None
        and not getattr(attention, "fused_projections", False)
        and not block.only_cross_attention
    )
