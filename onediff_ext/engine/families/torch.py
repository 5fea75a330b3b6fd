"""Blocks that are torch's own modules."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.families.base import IMAGE, BlockCall, BlockFamily, Refusal


class GroupNormFamily(BlockFamily):
    """A GroupNorm that is part of no other block, as before a model's last convolution.

    On a GPU only, where torch's own turns an NHWC image around for it: 7 ms for the last one
    of a VAE at 1024x1024, in place of half a millisecond.
    """

    label = "GroupNorm"
    sources = ()

    def block_class(self) -> type[nn.Module] | None:
        return nn.GroupNorm if torch.cuda.is_available() else None

    def packages(self) -> Mapping[str, str]:
        return {}

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.num_channels}"

    def bind(
        self,
        block: Any,  # noqa: ARG002
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> BlockCall | Refusal:
        if len(args) != 1 or kwargs or args[0].ndim != 4:
            return Refusal("called with something else than an image batch")
        return BlockCall((args[0],), (IMAGE,))

    def run(
        self,
        block: Any,
        tensors: Sequence[torch.Tensor],
        statics: Mapping[str, Hashable],  # noqa: ARG002
    ) -> torch.Tensor:
        output: torch.Tensor = block.forward(tensors[0])
        return output.contiguous(memory_format=torch.channels_last)
