"""The features that a picture reuses: one for each kind of UNet call, at a stable address."""

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

    Args:
        batch: Images at once, CFG's counted. A feature of fewer is not kept: short of memory, a
            forward may run in halves.

    Attributes:
        serial: Distinct for each feature of this process.
        tensor: [B, C, h, w], written in place by each full call; None before the first.
        is_torn: Whether the last full call ran in halves, of which none is kept.
        filled_at: Number of the evaluation that wrote it, or None when it must not be used.
        state: What else it depends on, such as whether a ControlNet took part.
        parts: What an adapter has made for it. They must not hold the feature, or its memory stays.
    """

    def __init__(self, batch: int) -> None:
        self.serial, self._batch = next(_serials), batch
        self.tensor: torch.Tensor | None = None
        self.is_torn = False
        self.filled_at: int | None = None
        self.state: Hashable = None
        self.parts: dict[Any, Any] = {}

    def store(self, value: torch.Tensor) -> None:
        """Copy a value in. The first one decides the address.

        Args:
            value: [B, C, h, w].

        Raises:
            RuntimeError: A CUDA graph is being recorded, and the tensor's memory would belong to
                its pool.
        """
        if value.shape[0] != self._batch:
            self.is_torn = True
            return
        tensor = self.tensor
        if tensor is None or tensor.shape != value.shape or tensor.dtype != value.dtype:
            if value.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("DeepCache: a forward was recorded before it ran once")
            # Never an inference tensor: it could not be written to outside of inference mode.
            with torch.inference_mode(False):
                self.tensor = tensor = torch.empty_like(value, requires_grad=False)
        with torch.no_grad():
            tensor.copy_(value)

    def tensors(self) -> list[torch.Tensor]:
        """As `KeptTensors.tensors`."""
        return [] if self.tensor is None else [self.tensor]

    @property
    def size_bytes(self) -> int:
        """Memory that its tensor takes."""
        return sum(tensor.nbytes for tensor in self.tensors())


class Features:
    """The features of one picture.

    After the picture nothing here keeps them alive. A CUDA graph that has their addresses frozen
    in it does: the next picture then finds the same feature again.
    """

    def __init__(self) -> None:
        self._used: OrderedDict[Hashable, Feature] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[Hashable, Feature] = weakref.WeakValueDictionary()

    def of(self, key: Hashable, batch: int) -> Feature:
        """Return the feature of a kind of call.

        Args:
            key: Of the kind.
            batch: Images at once, CFG's counted.

        Returns:
            The feature of this key that is still alive, or a new and empty one. With more than
            `MAX_KINDS` kinds the least recently used feature has to be written again.
        """
        feature = self._used.get(key) or self._alive.get(key) or Feature(batch)
        self._used[key] = self._alive[key] = feature
        self._used.move_to_end(key)
        if len(self._used) > MAX_KINDS:
            self._used.popitem(last=False)[1].filled_at = None
        return feature

    def invalidate(self) -> None:
        """Let no feature be used before a full call has written it again."""
        for feature in self._alive.values():
            feature.filled_at = None

    def release(self) -> None:
        """Release the memory, except what CUDA graphs hold."""
        self.invalidate()
        self._used.clear()

    @property
    def size_bytes(self) -> int:
        """Memory that features take now, including those that CUDA graphs hold."""
        return sum(feature.size_bytes for feature in self._alive.values())
