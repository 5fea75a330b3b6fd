"""A comparison that holds for a whole image once it was made in it."""

from __future__ import annotations

from collections.abc import Callable, Hashable


class OncePerImage:
    """Makes a comparison at the first call of each image."""

    def __init__(self) -> None:
        self._epoch: Hashable = None  # the last one in which it held

    def holds(self, epoch: Hashable, compare: Callable[[], bool]) -> bool:
        """Return whether a comparison holds.

        Args:
            epoch: Equal for the calls of one image. None makes the comparison each time.
            compare: Makes it.

        Returns:
            What `compare` returns, or True where it has held in this image.
        """
        if epoch is None or epoch != self._epoch:
            self._epoch = None
            if not compare():
                return False
            self._epoch = epoch
        return True
