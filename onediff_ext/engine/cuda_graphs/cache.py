"""The CUDA graphs of a session: how many may be alive, and which are evicted first."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from onediff_ext.core.words import counted
from onediff_ext.engine.checking.spot_checks import SpotChecks
from onediff_ext.engine.cuda_graphs.argument_containers import Changes
from onediff_ext.engine.cuda_graphs.model_tracker import FrozenState
from onediff_ext.engine.cuda_graphs.recorder import Recorder, Recording
from onediff_ext.engine.cuda_graphs.staleness import Snapshot
from onediff_ext.engine.cuda_graphs.static_buffers import StaticBuffers
from onediff_ext.engine.cuda_graphs.text_kv_graph import TextKvGraph
from onediff_ext.engine.forward_variants import KeptTensors
from onediff_ext.engine.memory_budget import MemoryBudget
from onediff_ext.engine.stopwatch import Stop
from onediff_ext.engine.streams import StreamOrder
from onediff_ext.engine.torch_versions import OutOfMemoryError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class CapturedGraph:
    """The CUDA graph of one forward of one shape.

    Args:
        recording: The work to replay.
        inputs: The tensors that the recording reads; a call's tensors are copied into them.
        state: What the model was when it was recorded. Keeps the graphs of its blocks alive, since
            the recording points into them.
        text_kv_graphs: By the index of an input, the graph that computes keys and values from it.
        owned_storages: All memory that the recording reads, except its own memory pool and the
            weights of the model.
        derived_places: Where weights lie that were made from others.
        keeps: What else the recording points into, such as features of DeepCache.
        checks: How many comparisons with the model's own forward it has passed.
        undecided_in: The epoch of the last comparison that decided nothing; None before any.
        share: Which part of a model's forward it is, above 0 and up to 1.
        replays: How often it was replayed for a call.
        argument_changes: How the forward changes lists and dictionaries of its call.
    """

    recording: Recording
    inputs: list[torch.Tensor]
    state: FrozenState
    text_kv_graphs: dict[int, TextKvGraph]
    owned_storages: Sequence[torch.UntypedStorage] = ()
    derived_places: Sequence[object] = ()
    keeps: Sequence[KeptTensors] = ()
    checks: int = 0
    undecided_in: int | None = None
    share: float = 1.0
    replays: int = 0
    argument_changes: Changes = ()

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.inputs[0].device

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors of a call into the inputs.

        Args:
            tensors: In the order of `inputs`, of the same shapes and dtypes.
        """
        for i, (target, source) in enumerate(zip(self.inputs, tensors, strict=True)):
            if i in self.text_kv_graphs:
                self.text_kv_graphs[i].update(source)
            else:
                target.copy_(source)


class CudaGraphCache:
    """Holds CUDA graphs, bounded by their number and by the memory of their shared pool.

    Args:
        recorder: Makes recordings.
        limit: Most whole forwards alive as CUDA graphs; 0 switches CUDA graphs off.
        budget: Decides how much memory they may hold. When they hold more, all CUDA graphs are
            dropped, since a pool releases memory only as a whole.
        spot_checks: Choose which replays in use are compared with eager again.
        found_wrong: Called with a model's class name and a reason when a replay that had passed
            its comparisons differs from eager.

    Attributes:
        static_buffers: What the recordings read and write.
        lock: Held while recording and replaying.
        order: Orders the work of recordings and replays on a GPU across streams.
        spot_checks, found_wrong, budget: As given.
        made: How many CUDA graphs were recorded.
        dropped: One line for each of the last drops, with its reason.
    """

    def __init__(
        self,
        recorder: Recorder,
        limit: int = 64,
        budget: MemoryBudget | None = None,
        spot_checks: SpotChecks | None = None,
        found_wrong: Callable[[str, str], None] = lambda what, problem: None,  # noqa: ARG005
    ) -> None:
        self.spot_checks = spot_checks or SpotChecks(enabled=False)
        self.found_wrong = found_wrong
        self._recorder, self._limit, self.budget = recorder, limit, budget or MemoryBudget()
        self.budget.note_pools(self._bytes_on)
        self._alive: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
        self._tensor_bytes: dict[str, int] | None = None
        self.static_buffers = StaticBuffers()
        self.lock = threading.RLock()
        self.order = StreamOrder()
        self._devices: set[torch.device] = set()  # of all recordings so far
        self.made = 0
        self.dropped: deque[str] = deque(maxlen=100)

    def __len__(self) -> int:
        return len(self._alive)

    @property
    def size_bytes(self) -> int:
        """How much the pools have grown for the CUDA graphs alive."""
        return sum(map(self._bytes_on, self._devices))

    @property
    def kept_bytes(self) -> int:
        """Memory of the tensors that the CUDA graphs alive keep for later forwards."""
        return sum(map(self._kept_on, self._devices))

    def _kept_on(self, device: torch.device) -> int:
        return sum(_storages_kept(self._alive_on(device)).values())

    def _alive_on(self, device: torch.device) -> list[CapturedGraph]:
        return [each for each in self._alive.values() if each.device == device]

    def _bytes_on(self, device: torch.device) -> int:
        """How much one device's pool has grown for them."""
        alive = self._alive_on(device)
        shared = {id(graph): graph for each in alive for graph in each.text_kv_graphs.values()}
        recordings = [captured.recording for captured in alive]
        recordings += [graph.recording for graph in shared.values()]
        return sum(recording.size_bytes for recording in recordings)

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Return why nothing is recorded on a device, or None.

        Args:
            device: Where the forward runs.
        """
        if self._limit < 1:
            return "CUDA graphs are switched off"
        return self._recorder.unavailable_reason(device)

    def stopwatch(self, device: torch.device) -> Stop:
        """Start a stopwatch behind the work that was launched so far.

        Args:
            device: Where the work runs.

        Returns:
            Stops it.
        """
        return self._recorder.stopwatch(device)

    def find(self, key: Hashable) -> CapturedGraph | None:
        """Return the CUDA graph of a key, and make it the most recently used one.

        Args:
            key: As `record` had it.

        Returns:
            The CUDA graph; None if none was recorded or it was dropped.
        """
        captured = self._alive.get(key)
        if captured is not None:
            self._alive.move_to_end(key)
        return captured

    def record(
        self,
        key: Hashable,
        make: Callable[[Recorder], CapturedGraph],
        device: torch.device,
        share: float = 1.0,
    ) -> CapturedGraph:
        """Make a CUDA graph and keep it. The least recently used ones make room for it.

        Args:
            key: Of the CUDA graph; a tuple that begins with the id of its model.
            make: Records it.
            device: Where it runs.
            share: Which part of a model's forward it will be, above 0 and up to 1.

        Returns:
            What `make` returned.

        Raises:
            torch.OutOfMemoryError: The budget allows no CUDA graph on this device, or the recording
                found no memory for its activations.
            CaptureError: As `Recorder.record`.
        """
        while self._alive and self._shares() + share > self._limit + 1e-6:
            self.drop(next(iter(self._alive)), f"there were {self._limit} already")
        pool_bytes, kept_bytes = self._bytes_on(device), self._kept_on(device)
        if pool_bytes + kept_bytes > self.budget.allowed_bytes(device, pool_bytes, kept_bytes):
            self.drop_all("their memory has reached its limit")
            if self.budget.allowed_bytes(device, 0) <= 0:
                raise OutOfMemoryError("There is no free memory for a CUDA graph.")
        captured = make(self._recorder)
        self._alive[key], self._tensor_bytes = captured, None
        self._devices.add(device)
        self.made += 1
        return captured

    def drop(self, key: Hashable, reason: str) -> None:
        """Drop one CUDA graph; nothing happens if there is none of this key.

        This happens within a picture, and the next recording releases the memory.

        Args:
            key: As `record` had it.
            reason: For the log.
        """
        if self._alive.pop(key, None) is not None:
            self._note(1, reason)
        if not self._alive:
            self._forget()

    def drop_snapshot(self, snapshot: Snapshot, reason: str) -> None:
        """Drop all CUDA graphs of one model state.

        Args:
            snapshot: Of that state.
            reason: For the log.
        """
        for key in [k for k, each in self._alive.items() if each.state.snapshot is snapshot]:
            self.drop(key, reason)

    def drop_model(self, model_id: int) -> None:
        """Drop all CUDA graphs of one model, and release their memory if there are no others.

        Args:
            model_id: The id with which their keys begin.
        """
        keys = [k for k in self._alive if isinstance(k, tuple) and k[0] == model_id]
        for key in keys:
            self.drop(key, "their model is no longer in use")
        if keys and not self._alive:
            self._recorder.release_memory()

    def drop_all(self, reason: str) -> int:
        """Drop all CUDA graphs and release their memory.

        Args:
            reason: For the log.

        Returns:
            How many there were.
        """
        with self.lock:
            count = len(self._alive)
            self._alive.clear()
            self._tensor_bytes = None
            self._forget()
            self._recorder.release_memory()
            if count:
                self._note(count, reason)
            return count

    def settle(self) -> int:
        """Drop all CUDA graphs if the rest of a picture has needed their memory before.

        To be called when no denoiser runs any more: before a VAE, and after a picture.

        Returns:
            How many were dropped.
        """
        with self.lock:
            held = {each: self._bytes_on(each) + self._kept_on(each) for each in self._devices}
            if not any(self.budget.must_give_back(*each) for each in held.items()):
                return 0
            return self.drop_all("the rest of the picture needs their memory")

    def note_ran_out(self) -> None:
        """Memory ran out in a host's own code."""
        for device in self._devices:
            self.budget.note_ran_out(device)

    def make_room(self, needed_bytes: int, device: torch.device) -> int:
        """Drop all CUDA graphs if a host is about to need more memory than is free.

        Args:
            needed_bytes: What the host needs.
            device: Where.

        Returns:
            How many were dropped.
        """
        with self.lock:
            free = self.budget.free_bytes(device, self._bytes_on(device))
            if not self._alive or free is None or free >= needed_bytes:
                return 0
            return self.drop_all("the host needs their memory")

    def held_bytes(self) -> dict[str, int]:
        """What CUDA graphs hold, by name, in bytes.

        ``"pools"`` are the pools' own memory, which torch counts as unused. The rest are tensors:
        ``"buffers"`` for inputs and outputs, what is ``"kept"`` by one forward for later ones, and
        ``"weights"`` with LoRAs merged or in 8 bits.
        """
        with self.lock:
            if self._tensor_bytes is None:  # a host asks before each step
                kept = _storages_kept(self._alive.values())
                weights = {
                    storage.data_ptr(): storage.nbytes()
                    for captured in self._alive.values()
                    for storage in captured.owned_storages
                    if storage.data_ptr() not in kept
                }
                self._tensor_bytes = {
                    "kept": sum(kept.values()),
                    "weights": sum(weights.values()),
                }
            return {
                "pools": self.size_bytes,
                "buffers": self.static_buffers.size_bytes,
                **self._tensor_bytes,
            }

    def _shares(self) -> float:
        return sum(captured.share for captured in self._alive.values())

    def _forget(self) -> None:
        self.static_buffers.release()
        self._recorder.forget()

    def _note(self, count: int, reason: str) -> None:
        self._tensor_bytes = None
        text = f"{counted(count, 'CUDA graph')} dropped: {reason}"
        self.dropped.append(text)
        logger.info("%s", text)


def _storages_kept(graphs: Iterable[CapturedGraph]) -> dict[int, int]:
    """The size of each storage that CUDA graphs keep for later forwards, by address."""
    tensors = [t for graph in graphs for kept in graph.keeps for t in kept.tensors()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
