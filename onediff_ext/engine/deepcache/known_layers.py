"""The layers of a UNet that an adapter has made its lists of."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class KnownLayers:
    """Tells when somebody has exchanged a layer of a UNet for another one.

    Attributes:
        version: Another one after each exchange. A feature, and lists of layers, belong to one.
    """

    def __init__(self) -> None:
        self.version = 0
        self._layers: tuple[nn.Module, ...] = ()

    def look(self, layers: Sequence[nn.Module]) -> bool:
        """Compare the layers with those of the last look.

        Args:
            layers: Those that the UNet has now, in order.

        Returns:
            Whether there are others now.
        """
        now = tuple(layers)
        if now == self._layers:  # modules are equal if they are the same
            return False
        self._layers = now
        self.version += 1
        return True
