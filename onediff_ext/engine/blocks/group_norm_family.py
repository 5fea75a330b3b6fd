"""Blocks that are torch's own modules, or classes of a host made from these."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.family import IMAGE, BlockCall, BlockFamily, Refusal


def small_blocks_pay() -> bool:
    """Whether blocks of one norm or matrix product are worth a graph: on a CPU each costs some
    ten seconds of C++ to build, and brings nothing."""
    return torch.cuda.is_available()


class GroupNorms(BlockFamily):
    """GroupNorms that are part of no other block: before a model's last convolution, and before
    the projection into a transformer where that is no block.

    On a GPU torch's own turns an NHWC image around for it: 7 ms for the last one of a VAE at
    1024x1024, in place of half a millisecond (H200, torch 2.11).
    """

    @abstractmethod
    def norm_class(self) -> type[nn.Module] | None:
        """The exact class, or None when its package is not installed."""

    def block_class(self) -> type[nn.Module] | None:
        return self.norm_class() if small_blocks_pay() else None

    def describe(self, block: Any) -> str:
        return f"{self.label} {block.num_channels}"

    def bind(
        self,
        block: Any,  # noqa: ARG002
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> BlockCall | Refusal:
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or args[0].ndim != 4:
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


class GroupNormFamily(GroupNorms):
    """torch's own class.

    Args:
        transient: Attributes that the host keeps on layers for itself.
        patchers: As `BlockFamily.patchers`.
    """

    label = "GroupNorm"
    sources = ()

    def __init__(
        self, ignored_attrs: frozenset[str] = frozenset(), trusted_patchers: tuple[str, ...] = ()
    ) -> None:
        self.ignored_attrs, self.trusted_patchers = ignored_attrs, trusted_patchers

    def norm_class(self) -> type[nn.Module] | None:
        return nn.GroupNorm

    def packages(self) -> Mapping[str, str]:
        return {}
