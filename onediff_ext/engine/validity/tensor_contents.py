"""Whether tensors still hold what they held, however they were written to."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Hashable, Iterable
from functools import cache
from typing import Any

import torch

from onediff_ext.engine.validity.content_kernel import ContentKernel


def content_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's values lie and how often they were written in place; another pair after a
    change. Writes through ``.data`` and of tensors made under inference mode are not counted:
    `TensorContents` sees these."""
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


class TensorContents:
    """Watches tensors from which something was computed that is kept: merged weights, copies in 8
    bits. Their contents are compared once for each picture.

    Attributes:
        generation: Another number after any of them has changed without a trace.
    """

    def __init__(self) -> None:
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}
        self._known: dict[torch.device, _Digest] = {}
        self._is_new = False
        self._epoch: Hashable = None
        self.generation = 0

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Watch tensors from which something has just been computed."""
        for tensor in tensors:
            known = self._watched.get(id(tensor))
            if known is None or known() is not tensor:
                self._watched[id(tensor)] = weakref.ref(tensor)
                self._is_new = True

    def settle(self) -> None:
        """Note what newly watched tensors hold; after each forward that may have watched some."""
        if self._is_new:
            self._is_new = False
            self._known = self._digests()

    def look(self, epoch: Hashable) -> int:
        """The generation now.

        Args:
            epoch: Equal for calls of one picture.
        """
        if epoch == self._epoch:
            return self.generation
        self._epoch = epoch
        if self._known:
            found = self._digests()
            changed = found.keys() != self._known.keys() or any(
                not digest.equals(self._known[device]) for device, digest in found.items()
            )
            self._known, self._is_new = found, False
            self.generation += changed
        return self.generation

    def changed(self) -> None:
        """Count what was computed from any of them as out of date."""
        self.generation += 1

    def _digests(self) -> dict[torch.device, _Digest]:
        alive: dict[torch.device, list[torch.Tensor]] = {}
        for key, reference in list(self._watched.items()):
            tensor = reference()
            if tensor is None:
                del self._watched[key]
            elif tensor.device.type != "meta":
                alive.setdefault(tensor.device, []).append(tensor)
        return {device: _Digest(tensors, device) for device, tensors in alive.items()}


class _Digest:
    """What some tensors of one device hold."""

    def __init__(self, tensors: list[torch.Tensor], device: torch.device) -> None:
        # Places, so that a tensor that moved, or others in the list, count as a change.
        self._forms = [(t.data_ptr(), t.numel(), t.dtype) for t in tensors]
        with torch.no_grad():
            dense = [_dense(tensor) for tensor in tensors]
            self._found: Any
            if device.type == "cuda":
                self._found = _kernel(device).digests(dense)
            else:
                self._found = [_checksum(tensor) for tensor in dense]

    def equals(self, other: _Digest) -> bool:
        if self._forms != other._forms:
            return False
        if isinstance(self._found, torch.Tensor):
            return torch.equal(self._found, other._found)
        return bool(self._found == other._found)


@cache
def _kernel(device: torch.device) -> ContentKernel:
    return ContentKernel(device)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers [N] in the order in which they lie in memory."""
    by_stride = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.detach().permute(by_stride).contiguous().view(-1)


def _checksum(tensor: torch.Tensor) -> int:
    raw: Any = tensor.view(torch.uint8).numpy()
    return zlib.crc32(raw)
