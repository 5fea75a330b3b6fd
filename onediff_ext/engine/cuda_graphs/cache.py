"""All captures of a session: how many there may be, and which go first."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from onediff_ext.engine.checking.spot_checks import SpotChecks
from onediff_ext.engine.cuda_graphs.recorder import Recorder, Recording
from onediff_ext.engine.cuda_graphs.staleness import Snapshot
from onediff_ext.engine.cuda_graphs.static_buffers import StaticBuffers
from onediff_ext.engine.cuda_graphs.text_kv_graph import TextKvGraph
from onediff_ext.engine.streams import StreamOrder

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class CapturedGraph:
    """One forward of one shape.

    Args:
        recording: To replay.
        inputs: The tensors that the recording reads; a call's tensors are copied into them.
        snapshot: What the model was when it was recorded.
        graphs: What each block ran through; kept alive, since the recording points into them.
        prompts: What was computed ahead from some of the inputs, by the input's index.
        owns: All memory that it reads and that is neither its own nor a weight of the model.
        derived_places: Where weights lie that were made from others.
        keeps: What else it points into.
        checks: Comparisons with the model's own forward that it has passed.
        share: How much of a model's forward it is.
    """

    recording: Recording
    inputs: list[torch.Tensor]
    snapshot: Snapshot
    graphs: list[object]
    prompts: dict[int, TextKvGraph]
    owns: Sequence[torch.UntypedStorage] = ()
    derived_places: Sequence[object] = ()
    keeps: object = None
    checks: int = 0
    share: float = 1.0
    replays: int = 0

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the recording read these: the tensors of a call, in order."""
        for i, (target, source) in enumerate(zip(self.inputs, tensors, strict=True)):
            if i in self.prompts:
                self.prompts[i].bring(source)
            else:
                target.copy_(source)


class CudaGraphCache:
    """Bounded by number and by the memory that their shared pool has grown to.

    Args:
        recorder: Makes them.
        limit: Most captures of whole forwards alive; 0 switches captures off.
        limit_bytes: Growth of the pool after which all are dropped, since a pool gives memory
            back only as a whole; None is a quarter of the device's memory.

    Attributes:
        slots: What they read and write.
        lock: Held by who records or replays.
        order: Of their work on a GPU, whichever streams it is launched on.
        spot_checks: Choose what is compared again.
        found_wrong: Told of a model whose replay had passed its comparisons and differs now.
    """

    def __init__(
        self,
        recorder: Recorder,
        limit: int = 64,
        limit_bytes: int | None = None,
        spot_checks: SpotChecks | None = None,
        found_wrong: Callable[[str, str], None] = lambda what, problem: None,  # noqa: ARG005
    ) -> None:
        self.spot_checks = spot_checks or SpotChecks(enabled=False)
        self.found_wrong = found_wrong
        self._recorder, self._limit, self._limit_bytes = recorder, limit, limit_bytes
        self._alive: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
        self.slots = StaticBuffers()
        self.lock = threading.RLock()
        self.order = StreamOrder()
        self.made = 0
        self.dropped: deque[str] = deque(maxlen=100)

    def __len__(self) -> int:
        return len(self._alive)

    @property
    def size_bytes(self) -> int:
        """How much the pool has grown for the captures alive."""
        captures = self._alive.values()
        parts = {id(part): part for capture in captures for part in capture.prompts.values()}
        recordings = [capture.recording for capture in captures]
        recordings += [part.recording for part in parts.values()]
        return sum(recording.size_bytes for recording in recordings)

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Why nothing is captured on this device, or None."""
        if self._limit < 1:
            return "captures are switched off"
        return self._recorder.unavailable_reason(device)

    def find(self, key: Hashable) -> CapturedGraph | None:
        """The capture of this key, now the most recently used."""
        capture = self._alive.get(key)
        if capture is not None:
            self._alive.move_to_end(key)
        return capture

    def record(
        self,
        key: Hashable,
        make: Callable[[Recorder], CapturedGraph],
        device: torch.device,
        share: float = 1.0,
    ) -> CapturedGraph:
        """Make a capture and keep it.

        Args:
            key: Of the capture.
            make: Makes it.
            device: Where it runs.
            share: How much of a model's forward it will be.

        Raises:
            CaptureError, torch.OutOfMemoryError: As `Recorder.record`.
        """
        while self._alive and self._shares() + share > self._limit + 1e-6:
            self.drop(next(iter(self._alive)), f"there were {self._limit} already")
        if self.size_bytes > self._bytes_allowed(device):
            self.drop_all("their memory pool has reached its limit")
        capture = make(self._recorder)
        self._alive[key] = capture
        self.made += 1
        return capture

    def drop(self, key: Hashable, reason: str) -> None:
        """Forget one capture."""
        if self._alive.pop(key, None) is not None:
            self._note(f"1 capture dropped: {reason}")
        if not self._alive:
            self._forget()

    def drop_snapshot(self, snapshot: Snapshot, reason: str) -> None:
        """Forget the captures of a model that has lost the weights that they read."""
        for key in [k for k, capture in self._alive.items() if capture.snapshot is snapshot]:
            self.drop(key, reason)

    def drop_model(self, owner: int) -> None:
        """Forget the captures whose keys begin with this owner."""
        for key in [k for k in self._alive if isinstance(k, tuple) and k[0] == owner]:
            self.drop(key, "their model is no longer in use")

    def drop_all(self, reason: str) -> int:
        """Forget all captures and give their memory back; returns how many there were."""
        with self.lock:
            count = len(self._alive)
            self._alive.clear()
            self._forget()
            if count:
                self._note(f"{count} captures dropped: {reason}")
            return count

    def _shares(self) -> float:
        return sum(capture.share for capture in self._alive.values())

    def _forget(self) -> None:
        self.slots.forget()
        self._recorder.forget()

    def _bytes_allowed(self, device: torch.device) -> int:
        if self._limit_bytes is None and device.type == "cuda":
            self._limit_bytes = torch.cuda.get_device_properties(device).total_memory // 4
        return self._limit_bytes if self._limit_bytes is not None else 2**62

    def _note(self, text: str) -> None:
        self.dropped.append(text)
        logger.info("%s", text)
