"""Which sizes of a model's forward are worth a CUDA graph."""

from __future__ import annotations

from collections.abc import Hashable

# A CUDA graph has paid for its recording after this many replays.
_WORTH_REPLAYS = 3
# After this many CUDA graphs in a row that were dropped before they had paid, something changes
# the model at every call, and recording costs more than it saves. Recording is tried again after
# a pause, and each pause is twice as long as the one before.
_MAX_WASTED = 4
_FIRST_PAUSE_CALLS = 32


class RecordingPolicy:
    """Remembers which sizes were seen and refused, and pauses recording when it does not pay."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._refused: dict[Hashable, str] = {}
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

    def refuse(self, key: Hashable, reason: str) -> None:
        """Never record a size again, until `forget`.

        Args:
            key: As `has_seen` takes it.
            reason: In plain words; `refusal_reason` returns it.
        """
        self._refused[key] = reason

    def refusal_reason(self, key: Hashable) -> str | None:
        """Return why a size is never recorded, or None.

        Args:
            key: As `has_seen` takes it.
        """
        return self._refused.get(key)

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
