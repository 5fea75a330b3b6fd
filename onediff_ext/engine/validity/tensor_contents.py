"""Notices that tensors were written to, also by writes that torch does not count."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from onediff_ext.engine.validity.content_kernel import ContentKernel
from onediff_ext.engine.weak_tensors import is_made_of_others

# Address, strides, number of elements and version counter.
Content = tuple[int, tuple[int, ...], int, int]

# Tensors that count no writes, by id. torch answers the question with an exception each time.
_uncounted: dict[int, weakref.ref[torch.Tensor]] = {}


def content_of(tensor: torch.Tensor) -> Content:
    """Return a value that differs after a counted write, and where the tensor lies otherwise.

    A tensor's numbers may get another order at the same address: ``weight.data = weight.data.t()``.

    torch counts no writes through ``.data``. `TensorContents` notices these, and writes to tensors
    that count none.

    Args:
        tensor: Of any shape.

    Returns:
        The address, the strides, the number of elements and the version.
    """
    return tensor.data_ptr(), tensor.stride(), tensor.numel(), version_of(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """Return how many writes torch has counted, or -1 for a tensor that counts none.

    Tensors made under inference mode count none. They still count none after ``module.to(dtype)``
    has given them other data, while `Tensor.is_inference` is False from then on. Others get data of
    that mode by ``module.to(dtype)`` within it: they have a counter, which stands still.

    Args:
        tensor: Of any shape.
    """
    if _uncounted and (known := _uncounted.get(id(tensor))) is not None and known() is tensor:
        return -1  # a tensor never begins to count
    if tensor.is_inference():
        return -1
    try:
        return tensor._version
    except RuntimeError:
        if not is_made_of_others(tensor):  # whose moves fail if somebody refers to them weakly
            _note_uncounted(tensor)
        return -1


def _note_uncounted(tensor: torch.Tensor) -> None:
    key = id(tensor)

    def forget(reference: weakref.ref[torch.Tensor]) -> None:
        if _uncounted.get(key) is reference:
            del _uncounted[key]

    _uncounted[key] = weakref.ref(tensor, forget)


def digest_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a tensor's dtype, shape, strides and the checksum of its numbers.

    The checksum is the same on all devices. A tensor on a GPU is copied to main memory for it.

    Args:
        tensor: Of any shape, with memory: not on the meta device.
    """
    return tensor.dtype, tensor.shape, tensor.stride(), _checksum(_dense(tensor).detach().cpu())


class TensorContents:
    """Compares the contents of watched tensors once for each image.

    Watched are the tensors from which merged weights and 8-bit copies were computed. Who computed
    something from a tensor sees counted writes by `content_of`; only the others are found here.
    """

    def __init__(self) -> None:
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}
        self._known: dict[torch.device, _Reading] = {}
        self._unread: set[int] = set()
        self._epoch: Hashable = None
        self._generation = 0

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Watch tensors from which something has just been computed.

        Args:
            tensors: Of any shapes; they are held weakly. `settle` reads the new ones.
        """
        for tensor in tensors:
            key = id(tensor)
            watched = self._watched.get(key)
            if watched is None or watched() is not tensor:
                self._watched[key] = weakref.ref(tensor)
                self._unread.add(key)
            elif self._stamp(key, tensor.device) != content_of(tensor):
                self._unread.add(key)  # it was computed again after a counted write

    def settle(self) -> None:
        """Note the contents of newly watched tensors. Call it after each forward."""
        if self._unread:
            unread, self._unread = self._unread, set()
            for device, new in self._read(unread).items():
                known = self._known.get(device)
                self._known[device] = new if known is None else known.updated(new)

    def current_generation(self, epoch: Hashable) -> int:
        """Return a number that grows when the contents of a watched tensor have changed.

        Args:
            epoch: Equal for the calls of one image; the contents are read once for them.
        """
        if epoch == self._epoch:
            return self._generation
        self._epoch = epoch
        if self._known:
            found = self._read(set(self._watched) - self._unread)
            self._generation += any(
                known.differs_from(found.get(device), self._alive)
                for device, known in self._known.items()
            )
            self._known = found
        return self._generation

    def _stamp(self, key: int, device: torch.device) -> Content | None:
        known = self._known.get(device)
        return None if known is None else known.stamps.get(key)

    def _alive(self, key: int) -> bool:
        return key in self._watched and key not in self._unread

    def _read(self, keys: set[int]) -> dict[torch.device, _Reading]:
        """Read the tensors of these keys that are alive, and forget the others."""
        alive: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for key in [key for key in self._watched if key in keys]:
            tensor = self._watched[key]()
            if tensor is None:
                del self._watched[key]
            elif tensor.device.type != "meta":
                alive.setdefault(tensor.device, []).append((key, tensor))
        return {device: _Reading.of(tensors, device) for device, tensors in alive.items()}


@dataclass(frozen=True, eq=False)
class _Reading:
    """The contents of some tensors of one device.

    Args:
        stamps: `content_of` each tensor, by its key.
        dtypes: The dtype of each tensor.
        counts: How many digests each tensor has.
        digests: int64 [sum of counts].
    """

    stamps: dict[int, Content]
    dtypes: dict[int, torch.dtype]
    counts: list[int]
    digests: torch.Tensor

    @classmethod
    def of(cls, tensors: Sequence[tuple[int, torch.Tensor]], device: torch.device) -> _Reading:
        """Read tensors."""
        with torch.no_grad():
            dense = [_dense(tensor) for _, tensor in tensors]
            if device.type == "cuda":
                digests, counts = _kernel(device).digests(dense)
            else:
                digests, counts = torch.tensor([*map(_checksum, dense)]), [1] * len(dense)
        return cls(
            {key: content_of(tensor) for key, tensor in tensors},
            {key: tensor.dtype for key, tensor in tensors},
            counts,
            digests,
        )

    def differs_from(self, later: _Reading | None, alive: Callable[[int], bool]) -> bool:
        """Whether a tensor that is still alive has changed without a counted write."""
        if later is not None and later.stamps == self.stamps and later.dtypes == self.dtypes:
            return not torch.equal(later.digests, self.digests)
        here, there = self._by_key(), {} if later is None else later._by_key()
        for key in filter(alive, self.stamps):
            if later is None or key not in there:
                return True  # on another device
            (*place, version), (*new_place, new_version) = self.stamps[key], later.stamps[key]
            if place != new_place or self.dtypes[key] != later.dtypes[key]:
                return True
            if version == new_version and not torch.equal(here[key], there[key]):
                return True
        return False

    def updated(self, new: _Reading) -> _Reading:
        """Return this reading with some tensors read again or added."""
        digests = {**self._by_key(), **new._by_key()}
        return _Reading(
            {**self.stamps, **new.stamps},
            {**self.dtypes, **new.dtypes},
            [len(part) for part in digests.values()],
            torch.cat(list(digests.values())),
        )

    def _by_key(self) -> dict[int, torch.Tensor]:
        return dict(zip(self.stamps, torch.split(self.digests, self.counts), strict=True))


@cache
def _kernel(device: torch.device) -> ContentKernel:
    return ContentKernel(device)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose numbers lie side by side: itself, if that is so, or a copy [N]."""
    if version_of(tensor) < 0:
        tensor = tensor.data  # torch may refuse to make a view of the tensor itself
    if tensor.is_contiguous():
        return tensor
    by_stride = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.detach().permute(by_stride).contiguous().view(-1)


def _checksum(tensor: torch.Tensor) -> int:
    raw: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(raw)
