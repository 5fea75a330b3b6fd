"""The base of all families of blocks that turn one image into another."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from onediff_ext.engine.blocks.family import (
    IMAGE,
    UNKNOWN_ARGUMENTS,
    Arguments,
    BlockCall,
    BlockFamily,
    Refusal,
    Statics,
    Tensors,
)


class ImageBlocks(BlockFamily):
    """Blocks whose only tensor is an image [B, C, H, W], the first of their `arguments`.

    Attributes:
        no_image: Refuses a call whose first argument is no image.
    """

    no_image: Refusal = UNKNOWN_ARGUMENTS

    def eager_reason(self, block: Any, arguments: Arguments) -> str | None:  # noqa: ARG002
        """Return why a call with these arguments runs eager, or None.

        Args:
            block: The host's module.
            arguments: As `sort` takes them; the first is an image (batch, channels, height, width).
        """
        return None

    def image_statics(self) -> tuple[tuple[str, Hashable], ...]:
        """Return `BlockCall.statics` of a call that is made now."""
        return ()

    def sort(self, block: Any, arguments: Arguments) -> BlockCall | Refusal:
        image = arguments.get(self.arguments[0])
        if not isinstance(image, torch.Tensor) or image.ndim != 4:
            return self.no_image
        reason = self.eager_reason(block, arguments)
        if reason is not None:
            return Refusal(reason)
        return BlockCall((image,), (IMAGE,), self.image_statics())  # [B, C, H, W]

    def run(self, block: Any, tensors: Tensors, statics: Statics) -> torch.Tensor:  # noqa: ARG002
        output: torch.Tensor = block.forward(tensors[0])
        return output
