"""The blocks of CompVis' models, which A1111, Forge and reForge run in versions of their own.

Up- and downsamplers stay eager: each is one convolution, for which a graph has nothing to fuse.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.arguments import UNKNOWN_ARGUMENTS, are_tensors, named_arguments
from onediff_ext.engine.blocks.attention import attend, attend_image
from onediff_ext.engine.blocks.family import IMAGE, VECTOR, BlockCall, BlockFamily, Refusal
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
    def unsupported_reason(self, block: Any, named: Mapping[str, Any]) -> str | None:
        """Why a block runs eager, or None.

        Args:
            block: The host's.
            named: The arguments of its call, by name.
        """

    def channels(self, block: Any) -> tuple[int, int]:
        return block.channels, block.out_channels

    def bind(
        self, block: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> BlockCall | Refusal:
        named = named_arguments(self.arguments, args, kwargs)
        if named is None or not are_tensors(named.get("x"), named.get("emb")):
            return UNKNOWN_ARGUMENTS
        reason = self.unsupported_reason(block, named)
        if reason is not None:
            return Refusal(reason)
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
        self,
        block: Any,
        x: torch.Tensor,
        context: torch.Tensor | None,
        statics: Mapping[str, Hashable],
    ) -> torch.Tensor:
        for attention in (block.attn1, block.attn2):
            if attention is not None:
                attention.forward.keywords["upcast"] = statics["upcast"]
        return self.forward(block, x, context)


class LdmVaeResnets(ResidualBlocks, LdmBlocks):
    """The VAE's residual block, without a time embedding."""

    class_name = "ResnetBlock"

    def channels(self, block: Any) -> tuple[int, int]:
        return block.in_channels, block.out_channels

    def bind(
        self,
        block: Any,  # noqa: ARG002
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> BlockCall | Refusal:
        named = named_arguments(("x", "temb"), args, kwargs)
        if named is None or named.get("temb") is not None or not are_tensors(named.get("x")):
            return UNKNOWN_ARGUMENTS
        return BlockCall((named["x"],), (IMAGE,))  # x [B, C, H, W]

    def run(
        self,
        block: Any,
        tensors: Sequence[torch.Tensor],
        statics: Mapping[str, Hashable],  # noqa: ARG002
    ) -> torch.Tensor:
        output: torch.Tensor = block.forward(tensors[0], None)
        return output


class LdmVaeAttention(LdmBlocks):
    """The single-head attention of the VAE's middle block, on images."""

    class_name = "AttnBlock"

    def refusal_reason(self) -> str | None:
        """Why the host's attention cannot be a graph's just now, or None."""
        return None

    def attention_statics(self) -> tuple[tuple[str, Hashable], ...]:
        """How the host wants attention computed just now; "upcast" is the only name."""
        return ()

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.in_channels}"

    def bind(
        self,
        block: Any,  # noqa: ARG002
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> BlockCall | Refusal:
        named = named_arguments(("x",), args, kwargs)
        if named is None or not are_tensors(named.get("x")):
            return UNKNOWN_ARGUMENTS
        reason = self.refusal_reason()
        if reason is not None:
            return Refusal(reason)
        return BlockCall((named["x"],), (IMAGE,), self.attention_statics())  # x [B, C, H, W]

    def run(
        self,
        block: Any,
        tensors: Sequence[torch.Tensor],
        statics: Mapping[str, Hashable],
    ) -> torch.Tensor:
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
