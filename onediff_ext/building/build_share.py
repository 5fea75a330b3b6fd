"""How much builds may take from the pictures that are drawn beside them.

A GPU draws while most processor cores are idle: builds run on these at full speed, and only work in
the drawing process needs turns. On a CPU pictures use all cores. Whatever builds get is taken from
pictures, and without a share of their own they would wait for as long as somebody draws.
"""

from __future__ import annotations

import torch

from onediff_ext.building.foreground_scheduler import SHARE_WHILE_DRAWING, ForegroundScheduler

# Share of the cores for builds beside the first picture, more with each picture, and the most.
FIRST_SHARE = 0.1
MORE_EACH_PICTURE = 0.05
LARGEST_SHARE = 0.25


class BuildShare:
    """The share of builds beside pictures.

    Args:
        foreground: Knows when a picture is drawn.
    """

    def __init__(self, foreground: ForegroundScheduler) -> None:
        self._foreground = foreground
        self._pictures_before = foreground.pictures_begun

    def begin(self) -> None:
        """Begin a build run with the smallest share."""
        self._pictures_before = self._foreground.pictures_begun

    def of_processors(self, device: torch.device) -> float:
        """Return the share of busy cores that worker processes get beside a picture.

        Args:
            device: Where pictures are drawn.

        Returns:
            0 on a GPU: workers use idle cores there.
        """
        if device.type != "cpu":
            return 0.0
        pictures = self._foreground.pictures_begun - self._pictures_before
        return min(LARGEST_SHARE, FIRST_SHARE + MORE_EACH_PICTURE * pictures)

    def of_turns(self, device: torch.device) -> float:
        """Return the share of the drawing time for work in the drawing process."""
        return max(SHARE_WHILE_DRAWING, self.of_processors(device))

    def pace(self, device: torch.device) -> float:
        """Return how fast builds come at least, beside what is drawn now; 1 is full speed."""
        share = self.of_processors(device)
        return share if share and self._foreground.is_drawing else 1.0
