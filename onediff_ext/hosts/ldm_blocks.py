"""The blocks of CompVis' models, which A1111, Forge and reForge run in versions of their own.

Up- and downsamplers stay eager: each is one convolution, for which a graph has nothing to fuse.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.attention import attend, attend_image
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
from onediff_ext.engine.blocks.image_family import ImageBlocks
from onediff_ext.engine.blocks.residual_family import ResidualBlocks
from onediff_ext.engine.blocks.transformer_family import TransformerBlocks


class LdmBlocks(BlockFamily):
    """Blocks of a class that a Python module of the host has."""

    class_name: str

    def __init__(self) -> None:
        self.label = self.class_name

    @abstractmethod
    def module_name(self) -> str:
        """The full name of the Python module that the class is written in."""

    def block_class(self) -> type[nn.Module] | None:
        return getattr(sys.modules.get(self.module_name()), self.class_name, None)

    def packages(self) -> Mapping[str, str]:
        return {}  # no host has a version; the digest of the source stands for it


class LdmResBlocks(ResidualBlocks, LdmBlocks):
    """The UNet's residual block, with a time embedding."""

    class_name = "ResBlock"
    arguments: tuple[str, ...] = ("x", "emb")

    @abstractmethod
    def eager_reason(self, block: Any, arguments: Arguments) -> str | None:
        """Return why a call with these arguments runs eager, or None."""

    def channels(self, block: Any) -> tuple[int, int]:
        return block.channels, block.out_channels

    def sort(self, block: Any, arguments: Arguments) -> BlockCall | Refusal:
        x, emb = arguments.get("x"), arguments.get("emb")
        if not (isinstance(x, torch.Tensor) and isinstance(emb, torch.Tensor)):
            return UNKNOWN_ARGUMENTS
        reason = self.eager_reason(block, arguments)
        if reason is not None:
            return Refusal(reason)
        return BlockCall((x, emb), (IMAGE, VECTOR))  # x [B, C, H, W], emb [B, T]

    def run(self, block: Any, tensors: Tensors, statics: Statics) -> torch.Tensor:  # noqa: ARG002
        output: torch.Tensor = block._forward(tensors[0], tensors[1])
        return output


class LdmTransformers(TransformerBlocks, LdmBlocks):
    """BasicTransformerBlock with self-attention and cross-attention.

    Its statics have "upcast": whether queries, keys and values are computed in float32.
    """

    class_name = "BasicTransformerBlock"
    # Names of the host's classes of attention.
    attention_classes: frozenset[str] = frozenset({"CrossAttention"})

    @abstractmethod
    def forward(self, block: Any, x: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
        """Call the block's own method, which must not write into x [B, N, D]."""

    def prepare(self, block: Any) -> None:
        super().prepare(block)
        # The host's own attention may slice by free memory, or may be impossible to trace.
        for module in block.modules():
            if type(module).__name__ in self.attention_classes:
                module.forward = partial(_attend, module)

    def call(
        self, block: Any, x: torch.Tensor, context: torch.Tensor | None, statics: Statics
    ) -> torch.Tensor:
        for attention in (block.attn1, block.attn2):
            forward = getattr(attention, "forward", None)
            if isinstance(forward, partial) and forward.func is _attend:
                forward.keywords["upcast"] = statics["upcast"]
        return self.forward(block, x, context)


class LdmVaeResnets(ResidualBlocks, ImageBlocks, LdmBlocks):
    """The VAE's residual block, without a time embedding."""

    class_name = "ResnetBlock"
    arguments = ("x", "temb")

    def channels(self, block: Any) -> tuple[int, int]:
        return block.in_channels, block.out_channels

    def eager_reason(self, block: Any, arguments: Arguments) -> str | None:  # noqa: ARG002
        return None if arguments.get("temb") is None else UNKNOWN_ARGUMENTS.reason

    def run(self, block: Any, tensors: Tensors, statics: Statics) -> torch.Tensor:  # noqa: ARG002
        output: torch.Tensor = block.forward(tensors[0], None)
        return output


class LdmVaeAttention(ImageBlocks, LdmBlocks):
    """The single-head attention of the VAE's middle block, on images.

    Its statics may have "upcast": whether queries, keys and values are computed in float32.
    """

    class_name = "AttnBlock"
    arguments = ("x",)

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.in_channels}"

    def run(self, block: Any, tensors: Tensors, statics: Statics) -> torch.Tensor:
        return attend_image(block, tensors[0], upcast=bool(statics.get("upcast")))


def _attend(
    attention: Any,
    x: torch.Tensor,
    context: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    transformer_options: object = None,  # noqa: ARG001
    *,
    upcast: bool = False,
    **extra: Any,
) -> torch.Tensor:
    """The forward of an attention, by PyTorch's own kernel. It leaves every size symbolic.

    Takes the arguments of all hosts' versions, as long as they change nothing.
    """
    if value is not None or mask is not None or any(extra.values()):
        raise NotImplementedError("attention with values of their own, a mask or other arguments")
    return attend(attention, x, context, upcast=upcast)
