"""The tensors that a picture reuses: one for each kind of UNet call, at a stable address."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch

_serials = itertools.count(1)

# Pictures have one kind of call; split or alternating batches have two, regional prompts a few.
MAX_KINDS = 8


class Feature:
    """The cached feature of one kind of call.

    Attributes:
        serial: Distinct for each feature of this process.
        tensor: [B, C, h, w], written in place by each full call; None before the first.
        filled_at: The evaluation that wrote it, or None when it must not be used.
        state: What else it depends on, such as whether a ControlNet took part.
        outline: What the adapter has to know about the skipped layers.
    """

    def __init__(self) -> None:
        self.serial = next(_serials)
        self.tensor: torch.Tensor | None = None
        self.filled_at: int | None = None
        self.state: Hashable = None
        self.outline: dict[Any, torch.Size] = {}

    def store(self, value: torch.Tensor) -> None:
        """Copy a feature in; the first call of all decides shape and address.

        Raises:
            RuntimeError: Memory would be taken inside a capture, which would free it again.
        """
        tensor = self.tensor
        if tensor is None or tensor.shape != value.shape or tensor.dtype != value.dtype:
            if value.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("DeepCache: a forward was captured before it ran once")
            # Never an inference tensor: those cannot be written to outside inference mode.
            with torch.inference_mode(False):
                self.tensor = tensor = torch.empty_like(value, requires_grad=False)
        with torch.no_grad():
            tensor.copy_(value)

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return 0 if self.tensor is None else self.tensor.numel() * self.tensor.element_size()


class Features:
    """The features of one picture.

    After the picture nothing here keeps them alive. A captured forward that has their addresses
    frozen in does: the same feature is then found again for the next picture.
    """

    def __init__(self) -> None:
        self._used: OrderedDict[Hashable, Feature] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[Hashable, Feature] = weakref.WeakValueDictionary()

    def of(self, key: Hashable) -> Feature:
        """The feature of a kind of call, new and empty for a new kind."""
        feature = self._used.get(key) or self._alive.get(key) or Feature()
        self._used[key] = self._alive[key] = feature
        self._used.move_to_end(key)
        if len(self._used) > MAX_KINDS:
            self._used.popitem(last=False)[1].filled_at = None
        return feature

    def invalidate(self) -> None:
        """Let no feature be used again before a full call has written it."""
        for feature in self._alive.values():
            feature.filled_at = None

    def release(self) -> None:
        """Give the memory back, but for what captures hold."""
        self.invalidate()
        self._used.clear()

    @property
    def size_bytes(self) -> int:
        """Memory that features take now, captures' included."""
        return sum(feature.size_bytes for feature in self._alive.values())
