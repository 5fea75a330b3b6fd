"""Where recordings read what they are called with, and leave what they give."""

from __future__ import annotations

import torch


class StaticBuffers:
    """One place for each position of a tensor in a call, shared by all recordings of a device.

    What a recording needs is copied in right before its replay, and what it gives is copied out
    right behind it, so that any number of recordings takes no more than the largest of them.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[torch.device, int], torch.Tensor] = {}

    def take(self, index: int, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor of that shape and type in the place of this index, which may grow for it: not
        while something is recorded, whose memory it would be."""
        strides = torch.empty_like(like, device="meta").stride()
        place = self._places.get((device, index))
        needed = like.numel() * like.element_size()
        with torch.inference_mode(False):  # or it could not be written outside of it
            if place is None or place.numel() < needed:
                # Twice the last one: recordings keep the places that they were made with.
                size = max(needed, 2 * place.numel() if place is not None else 0)
                size = (size // 16 + 1) * 16  # of any type
                place = torch.empty(size, dtype=torch.uint8, device=device)
                self._places[device, index] = place
            return place.view(like.dtype).as_strided(like.shape, strides)

    def forget(self) -> None:
        """Give the memory back, once no recording needs it."""
        self._places.clear()
