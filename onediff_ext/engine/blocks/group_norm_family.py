"""GroupNorms as blocks: torch's own class, and classes that hosts derive from it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.family import Refusal, Statics, Tensors
from onediff_ext.engine.blocks.image_family import ImageBlocks


def small_blocks_pay() -> bool:
    """Return whether blocks of one norm or matrix product are worth a graph.

    On a CPU each costs about ten seconds of C++ compilation and saves nothing.
    """
    return torch.cuda.is_available()


class GroupNorms(ImageBlocks):
    """GroupNorms outside of other blocks.

    One comes before a model's last convolution, others before the projection into a transformer
    where that projection is no block.

    On a GPU torch's own GroupNorm transposes an NHWC image. This takes 7 ms for the last one of a
    VAE at 1024x1024, and half a millisecond without (H200, torch 2.11).
    """

    arguments = ("x",)
    no_image = Refusal("called with something else than an image batch")

    @abstractmethod
    def norm_class(self) -> type[nn.Module] | None:
        """Return the exact class, or None when its package is not installed."""

    def block_class(self) -> type[nn.Module] | None:
        """Return `norm_class` where a GPU is present.

        Returns:
            None where the package is not installed, and without a GPU: see `small_blocks_pay`.
        """
        return self.norm_class() if small_blocks_pay() else None

    def describe(self, block: Any) -> str:
        """Return label and number of channels, such as ``"GroupNorm 320"``.

        Args:
            block: A norm of `norm_class`.
        """
        return f"{self.label} {block.num_channels}"

    def run(self, block: Any, tensors: Tensors, statics: Statics) -> torch.Tensor:
        """Return the norm's output in NHWC order.

        Args:
            block: The norm, or its copy that is traced.
            tensors: The image (batch, channels, height, width) alone.
            statics: As `ImageBlocks.image_statics`; not read.
        """
        return super().run(block, tensors, statics).contiguous(memory_format=torch.channels_last)


class GroupNormFamily(GroupNorms):
    """torch's own GroupNorm.

    Args:
        ignored_attrs: As `BlockFamily.ignored_attrs`.
        trusted_patchers: As `BlockFamily.trusted_patchers`.
    """

    label = "GroupNorm"
    arguments = ("input",)
    sources = ()

    def __init__(
        self, ignored_attrs: frozenset[str] = frozenset(), trusted_patchers: tuple[str, ...] = ()
    ) -> None:
        self.ignored_attrs, self.trusted_patchers = ignored_attrs, trusted_patchers

    def norm_class(self) -> type[nn.Module] | None:
        return nn.GroupNorm

    def packages(self) -> Mapping[str, str]:
        """Return nothing: a key has torch's version anyway."""
        return {}
