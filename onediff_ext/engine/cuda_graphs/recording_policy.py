"""Which sizes of a model's forward are worth a CUDA graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

# A CUDA graph has paid for its recording after this many replays.
_WORTH_REPLAYS = 3
# After this many CUDA graphs in a row that were dropped before they had paid, something changes
# the model at every call, and recording costs more than it saves. Recording is tried again after
# a pause, and each pause is twice as long as the one before.
_MAX_WASTED = 4
_FIRST_PAUSE_CALLS = 32
# So often a recording of one size may fail, each time with another model.
_MAX_FAILED = 4


@dataclass
class _Refusal:
    """Why a size is not recorded.

    Args:
        reason: In plain words.
        origin: `Snapshot.origin` of the model that could not be recorded; None refuses for good.
        epoch: In which the model was last found to be that one.
    """

    reason: str
    origin: object | None
    epoch: int | None


class RecordingPolicy:
    """Remembers which sizes were seen and refused, and pauses recording when it does not pay."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._refused: dict[Hashable, _Refusal] = {}
        self._failed: Counter[Hashable] = Counter()
        self._wasted = self._paused_calls = 0
        self._pause_calls = _FIRST_PAUSE_CALLS

    def has_seen(self, key: Hashable) -> bool:
        """Whether a size has run before.

        Args:
            key: Of the CUDA graph, as `CudaGraphCache.record` takes it.
        """
        return key in self._seen

    def note_seen(self, key: Hashable) -> None:
        """Remember that a size has run.

        Args:
            key: As `has_seen` takes it.
        """
        self._seen.add(key)

    def refuse(
        self, key: Hashable, reason: str, origin: object = None, epoch: int | None = None
    ) -> None:
        """Do not record a size again.

        Args:
            key: As `has_seen` takes it.
            reason: In plain words; `refusal_reason` returns it.
            origin: `Snapshot.origin` of a model that could not be recorded. Another model is
                recorded, up to four times in all. None refuses until `forget`.
            epoch: Of the call; see `KindRegistry.epoch`.
        """
        self._failed[key] += 1
        is_final = self._failed[key] >= _MAX_FAILED
        self._refused[key] = _Refusal(reason, None if is_final else origin, epoch)

    def refusal_reason(
        self, key: Hashable, epoch: int | None, origin_now: Callable[[], object]
    ) -> str | None:
        """Return why a size is not recorded, or None.

        Args:
            key: As `has_seen` takes it.
            epoch: Of the call. The model is looked at once in each, or at each call without one.
            origin_now: Returns `Snapshot.origin` of the model as it is.
        """
        refusal = self._refused.get(key)
        if refusal is None:
            return None
        if refusal.origin is not None and (epoch is None or epoch != refusal.epoch):
            refusal.epoch = epoch
            if origin_now() is not refusal.origin:
                del self._refused[key]
                return None
        return refusal.reason

    def pause_reason(self) -> str | None:
        """Why nothing is recorded at this call, or None. Counts the calls of a pause."""
        if self._wasted < _MAX_WASTED:
            return None
        self._paused_calls += 1
        if self._paused_calls < self._pause_calls:
            return "something changes the model at every call"
        self._wasted, self._paused_calls = _MAX_WASTED - 1, 0
        self._pause_calls *= 2
        return None

    def note_replays(self, count: int) -> None:
        """Note a replay. The third one pays for the recording and resets the pauses.

        Args:
            count: How often this CUDA graph has been replayed now.
        """
        if count == _WORTH_REPLAYS:
            self._wasted, self._pause_calls = 0, _FIRST_PAUSE_CALLS

    def note_dropped(self, replays: int) -> None:
        """Note that a CUDA graph was dropped because the model has changed.

        Args:
            replays: How often it had been replayed. With fewer than three it counts as wasted.
        """
        if replays < _WORTH_REPLAYS:
            self._wasted += 1

    def forget(self) -> None:
        """Drop what is known of all sizes."""
        self._seen.clear()
        self._refused.clear()
        self._failed.clear()
