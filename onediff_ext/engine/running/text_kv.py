"""What one block has computed from the prompt ahead of its graph, and how long that holds."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence

import torch

from onediff_ext.engine.torch_versions import autocast_dtype
from onediff_ext.engine.validity.tensor_contents import content_of


class TextKv:
    """Tensors that a block's `prompt_layers` made of a prompt.

    They serve the steps of one picture: the same tensor as the prompt, unchanged, weights
    unchanged, and nothing in between that could have changed either unseen.

    Args:
        prompt: The tensor they were made of.
        tensors: What was made.
        stamp: From `stamp_of`; None if a change would not be seen, so that they serve one call.
        weights: Of the layers that made them.
    """

    def __init__(
        self,
        prompt: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
        stamp: Hashable,
        weights: Sequence[torch.Tensor],
    ) -> None:
        self._prompt, self.tensors, self._stamp = weakref.ref(prompt), tensors, stamp
        # Not kept alive: a host may have given them up for another checkpoint's.
        self._weights = [weakref.ref(weight) for weight in weights]

    @property
    def prompt(self) -> torch.Tensor | None:
        """The tensor they were made of, while it lives."""
        return self._prompt()

    def serve(self, prompt: torch.Tensor, stamp: Hashable, weights: Sequence[torch.Tensor]) -> bool:
        """Whether they are what these weights would make of this prompt now."""
        return (
            stamp is not None
            and stamp == self._stamp
            and self._prompt() is prompt
            and len(weights) == len(self._weights)
            and all(known() is weight for known, weight in zip(self._weights, weights, strict=True))
        )


class PinnedTextKv(TextKv):
    """Projections that serve a tensor whatever happens to it: while a capture is recorded, the
    prompt is the capture's own input, which whoever replays it keeps up to date."""

    def __init__(self, prompt: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> None:
        super().__init__(prompt, tensors, None, ())

    def serve(
        self,
        prompt: torch.Tensor,
        stamp: Hashable,  # noqa: ARG002
        weights: Sequence[torch.Tensor],  # noqa: ARG002
    ) -> bool:
        return self._prompt() is prompt


def stamp_of(
    epoch: Hashable, prompt: torch.Tensor, weights: Sequence[torch.Tensor]
) -> Hashable | None:
    """A value that differs when a prompt or weights have changed in place, or autocast would make
    something else of them; None if that cannot be seen: tensors made under inference mode count no
    versions.

    Args:
        epoch: Differs after any moment in which weights may have changed without a trace.
        prompt, weights: What to look at.
    """
    tensors = (prompt, *weights)
    if any(tensor.is_inference() for tensor in tensors):
        return None
    autocast = autocast_dtype(prompt.device.type)
    return (epoch, autocast, *(content_of(tensor) for tensor in tensors))
