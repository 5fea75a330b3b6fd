"""A recorder for CPUs that behaves like CUDA graphs.

It logs the operators that a function runs and the storages that they touch, and replays the
operators without the function. Like a CUDA graph, a recording

- reads and writes the same storages: a weight written in place counts, a new Python value or
  attribute does not;
- has no effect while it is made, also if it fails: what the function wrote is restored, and what it
  allocated holds nothing, wherever the function has left it;
- owns only storages that were allocated within it. A foreign storage that was freed or moved reads
  as NaN, since its memory would have another owner;
- shares a memory pool: a replay overwrites the results of later recordings with NaN, except
  lasting ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from onediff_ext.core.errors import CaptureError
from onediff_ext.engine.cuda_graphs.recorder import Recorder, Recording
from onediff_ext.engine.graph_calls import observed_by
from onediff_ext.engine.stopwatch import Stop, Timing
from onediff_ext.engine.torch_versions import OutOfMemoryError
from tests.support.operator_log import OperatorLog, alive_storage, spoil


class Never(Timing):
    """The time of work that does not end."""

    def __call__(self) -> float:
        raise AssertionError("waits for work that does not end")

    def is_done(self) -> bool:
        return False


NEVER = Never()


@dataclass(eq=False)
class Made:
    """Counts of one recording, for tests. It keeps nothing of the recording alive.

    Args:
        replays: Number of replays.
        freed: Accesses of replays to storages that were freed or moved.
        size_bytes: Memory of the recording.
    """

    replays: int = 0
    freed: int = 0
    size_bytes: int = 100


class FrozenRecorder(Recorder):
    """Records on a CPU, and counts.

    Attributes:
        forwards: Recordings of forwards, in order.
        prompts: Recordings whose output is a list: those of the text KV cache.
        error: Raised by the next recording, if set.
        forgotten: How often all memory was freed.
        python, replay, recording: What a stopwatch shows for a forward in Python, for a replay and
            for a recording.
    """

    def __init__(self) -> None:
        self.forwards: list[Made] = []
        self.prompts: list[Made] = []
        self.error: Exception | None = None
        self.forgotten = 0
        self.python: Timing = NEVER
        self.replay: Timing = NEVER
        self.recording: Timing = NEVER
        self._left: list[list[StorageWeakRef]] = []  # per recording in the pool

    @property
    def recorded(self) -> int:
        """Number of recorded forwards."""
        return len(self.forwards)

    @property
    def replays(self) -> int:
        """Replays of all recordings."""
        return sum(made.replays for made in (*self.forwards, *self.prompts))

    @property
    def freed(self) -> int:
        """Accesses of all replays to storages that were freed or moved."""
        return sum(made.freed for made in (*self.forwards, *self.prompts))

    def unavailable_reason(self, device: torch.device) -> str | None:
        return None

    def stopwatch(self, device: torch.device) -> Stop:
        before = self.recorded, self.replays

        def stop() -> Timing:
            if self.recorded > before[0]:
                return self.recording
            return self.replay if self.replays > before[1] else self.python

        return stop

    def record(
        self,
        function: Callable[[], Any],
        device: torch.device,
        lasting: bool = False,
        **others: Any,
    ) -> Recording:
        if self.error is not None:
            raise self.error
        log = OperatorLog()
        try:
            with log, observed_by(log):
                output = function()
        except OutOfMemoryError:
            raise
        except Exception as exc:
            lines = [line for line in str(exc).splitlines() if line.strip()]
            raise CaptureError(lines[0] if lines else type(exc).__name__) from exc
        finally:
            log.put_back()
            left = log.close()
        number = None
        if not lasting:
            number = len(self._left)
            self._left.append(left)
        made = Made()
        (self.prompts if isinstance(output, list) else self.forwards).append(made)
        return FrozenRecording(log, output, made, self, number)

    def overwrite(self, number: int) -> None:
        """Overwrite the results of later recordings in the pool with NaN."""
        for left in self._left[number + 1 :]:
            for weak in left:
                storage = alive_storage(weak)
                if storage is not None:
                    spoil(storage)

    def forget(self) -> None:
        self.forgotten += 1

    def release_memory(self) -> None:
        pass  # what nobody holds is free already


class FrozenRecording(Recording):
    """The recording of one call.

    Args:
        log: Its operators and storages.
        output: The function's result.
        made: Counts its replays.
        recorder: Owns the memory pool.
        number: Its index in the pool; None if it has memory of its own.
    """

    def __init__(
        self,
        log: OperatorLog,
        output: Any,
        made: Made,
        recorder: FrozenRecorder,
        number: int | None,
    ) -> None:
        self.output, self.size_bytes = output, made.size_bytes
        self._log, self._made, self._number = log, made, number
        self._recorder, self._of = weakref.ref(recorder), recorder.forgotten

    def replay(self) -> None:
        recorder = self._recorder()
        assert recorder is not None
        assert recorder.forgotten == self._of, "replayed after its memory was given back"
        if self._number is not None:
            recorder.overwrite(self._number)
        self._made.replays += 1
        self._made.freed += self._log.replay()
