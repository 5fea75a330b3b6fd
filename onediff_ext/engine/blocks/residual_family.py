"""The base of all families of residual blocks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from onediff_ext.engine.blocks.family import BlockCall, BlockFamily


class ResidualBlocks(BlockFamily):
    """Norms and convolutions from an image [B, C, H, W] to [B, C', H, W].

    The block may add a time embedding [B, T].
    """

    @abstractmethod
    def channels(self, block: Any) -> tuple[int, int]:
        """Return the channels of the input and of the output, C and C'.

        Args:
            block: The host's module.
        """

    def describe(self, block: Any) -> str:
        before, after = self.channels(block)
        return f"{self.label} {before}→{after}"

    def widest(self, block: Any, call: BlockCall) -> int:
        x = call.tensors[0]
        return x.numel() // x.shape[1] * max(self.channels(block))
