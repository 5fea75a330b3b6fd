"""Whether a CUDA graph saves more than its recording costs, where none lasts for long."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from statistics import mean
from weakref import ref

from onediff_ext.engine.cuda_graphs.staleness import Snapshot
from onediff_ext.engine.stopwatch import Timing

# Of the last forwards in Python the mean counts, since a busy processor makes some of them slower.
# It does not slow replays down, so of these the fastest counts, and of recordings the cheapest.
_FORWARDS = _REPLAYS = 4
# The first recording of a process also loads code, so it says little about the next ones.
_RECORDINGS, _SLOW_RECORDINGS = 3, 1
_REASON = "recording costs more than it saves before the weights move"


@dataclass(eq=False)
class _Size:
    """What is known of the forwards of one size.

    Args:
        snapshot: Of the model when `calls` began; None while a CUDA graph serves the size.
        calls: Forwards since then, or since the CUDA graph was recorded.
        calls_before: How many there were the time before.
        python: The last forwards in Python.
        replays: The last replays that were measured.
        refused_in: The epoch in which nothing was recorded because it does not pay.
    """

    snapshot: ref[Snapshot] | None = None
    calls: int = 0
    calls_before: int = 0
    python: deque[Timing] = field(default_factory=lambda: deque(maxlen=_FORWARDS))
    replays: deque[Timing] = field(default_factory=lambda: deque(maxlen=_REPLAYS))
    refused_in: int | None = None


class RecordingGain:
    """Compares what CUDA graphs of one model save with what recording them costs.

    A host that moves a model out of the GPU's memory makes its CUDA graphs useless. On a small GPU
    that happens at each picture. Where the GPU's work takes longer than Python, a replay is hardly
    faster than the forward itself, and the next picture is faster without a recording.

    So a size is recorded if its CUDA graph will save more than a recording takes: over as many
    forwards as there were from the last recording to the end of that CUDA graph. Without a CUDA
    graph it is recorded as soon as the present forwards would have paid for it, so a wrong
    expectation costs no more than one recording. Without measurements every recording pays.
    """

    def __init__(self) -> None:
        self._sizes: dict[Hashable, _Size] = {}
        self._recordings: deque[Timing] = deque(maxlen=_RECORDINGS)
        self._slow_recordings = _SLOW_RECORDINGS

    def note_python(self, key: Hashable, timing: Timing) -> None:
        """Note a forward in Python, of which no block was compared.

        Args:
            key: Of the CUDA graph, as `CudaGraphCache.record` takes it.
            timing: Of the forward.
        """
        size = self._size(key)
        size.calls += 1
        size.python.append(timing)

    def note_replay(self, key: Hashable, timing: Timing | None = None) -> None:
        """Note a replay. One of a model that has changed counts as well.

        Args:
            key: As `note_python` takes it.
            timing: Of the replay, if that was measured.
        """
        size = self._size(key)
        size.calls += 1
        if timing is not None:
            size.replays.append(timing)

    def note_recording(self, key: Hashable, timing: Timing) -> None:
        """Note a CUDA graph that has just been recorded and compared.

        Args:
            key: As `note_python` takes it.
            timing: Of both.
        """
        size = self._size(key)
        size.snapshot, size.refused_in, size.calls = None, None, 0
        if self._slow_recordings:
            self._slow_recordings -= 1
        else:
            self._recordings.append(timing)

    def still_refused_reason(self, key: Hashable, epoch: int | None) -> str | None:
        """Return why nothing is recorded, if that was decided in this epoch; otherwise None.

        Args:
            key: As `note_python` takes it.
            epoch: Of the call; see `KindRegistry.epoch`. None stands for no epoch.
        """
        size = self._size(key)
        if epoch is None or size.refused_in != epoch or self._pays(size):
            return None
        return _REASON

    def refused_reason(self, key: Hashable, epoch: int | None, snapshot: Snapshot) -> str | None:
        """Decide whether a size is recorded.

        Args:
            key: As `note_python` takes it.
            epoch: As `still_refused_reason` takes it.
            snapshot: What the model is. Another one means that the weights have moved.

        Returns:
            In plain words, for the status; None if the size is to be recorded.
        """
        size = self._size(key)
        if size.snapshot is None or size.snapshot() is not snapshot:
            size.snapshot, size.calls_before, size.calls = ref(snapshot), size.calls, 0
        if self._pays(size):
            return None
        size.refused_in = epoch
        return _REASON

    def forget(self) -> None:
        """Drop all measurements."""
        self._sizes.clear()
        self._recordings.clear()
        self._slow_recordings = _SLOW_RECORDINGS

    def _size(self, key: Hashable) -> _Size:
        return self._sizes.setdefault(key, _Size())

    def _pays(self, size: _Size) -> bool:
        python, replays = _seconds(size.python), _seconds(size.replays)
        recordings = _seconds(self._recordings)
        if not (python and replays and recordings):
            return True
        saved_s = mean(python) - min(replays)
        return saved_s * max(size.calls, size.calls_before) > min(recordings)


def _seconds(timings: Iterable[Timing]) -> list[float]:
    return [timing() for timing in timings if timing.is_done()]
