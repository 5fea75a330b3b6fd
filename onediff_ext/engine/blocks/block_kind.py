"""A kind of block at run time: its key, its graph once there is one, and what became of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from weakref import WeakSet

import torch
from torch import nn

from onediff_ext.core.kind_key import KindKey
from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.checking.compare_with_eager import Comparison
from onediff_ext.engine.quantization import Quantization

# After so many pictures at the most, a kind that could not be exported is tried again.
_LONGEST_PAUSE = 16


class KindState(Enum):
    """Where a kind stands."""

    MISSING = "missing"  # no graph yet: eager
    UNCHECKED = "unchecked"  # a graph, not yet compared with eager in this process
    READY = "ready"
    FAILED = "failed"  # eager for good, with a reason


class LiveBlocks:
    """The blocks of one kind that are alive: a host makes new ones for each checkpoint.

    They are met by the thread that draws and looked through by others.
    """

    def __init__(self) -> None:
        self._blocks: WeakSet[nn.Module] = WeakSet()
        self._lock = threading.Lock()

    def add(self, block: nn.Module) -> None:
        """A block of this kind was met."""
        with self._lock:
            self._blocks.add(block)

    def __iter__(self) -> Iterator[nn.Module]:
        with self._lock:
            return iter(list(self._blocks))

    def __len__(self) -> int:
        return len(self._blocks)


@dataclass(eq=False)
class BlockKind:
    """One kind in one process, shared by all its blocks in all pipes.

    Args:
        key: Identifies the kind on disk.
        label: A few words for people.
        device: Where its blocks live.
        prepare_export: Readies everything for the export on a device, its own or the CPU, and
            returns what does it: the serialised program to build from.
        quantisation: Which of its weights are 8-bit copies; None for none.
        work: Multiplications of one call at the size it was first met with, for ordering builds.
    """

    key: KindKey
    label: str
    device: torch.device
    prepare_export: Callable[[torch.device], Callable[[], bytes]]
    quantization: Quantization | None = None
    work: float = 0.0
    state: KindState = KindState.MISSING
    graph: Graph | None = None
    reason: str = ""
    source: str = ""  # "built" or "loaded"
    comparison: Comparison | None = None
    is_coming: bool = False  # its graph is loaded, and used from the next picture on
    calls: int = 0
    blocks: LiveBlocks = field(default_factory=LiveBlocks)
    tries: int = 0  # exports that came to nothing in this process, since its last graph
    _waits_for: int | None = None  # the epoch from which on it is built when it is met again

    @property
    def weight(self) -> float:
        """What its calls have cost so far, to build first what saves most."""
        return self.calls * self.work

    def export(self) -> bytes:
        """Make the exported program to build from, serialised.

        Raises:
            ExportError: The block cannot be expressed as a graph.
        """
        return self.prepare_export(self.device)()

    def accept(self, graph: Graph, source: str) -> None:
        """Take a graph into use; its first run will be compared with eager."""
        self.graph, self.source, self.state = graph, source, KindState.UNCHECKED
        self.reason, self.is_coming = "", False
        self.tries, self._waits_for = 0, None

    def fail(self, reason: str) -> None:
        """Run eager from now on, and say why."""
        self.graph, self.state, self.reason = None, KindState.FAILED, reason
        self.is_coming = False

    def miss(self, reason: str) -> None:
        """Run eager until there is a graph again, and say why."""
        self.graph, self.state, self.reason, self.source = None, KindState.MISSING, reason, ""
        self.is_coming = False
        self.tries, self._waits_for = 0, None

    def put_off(self, reason: str, epoch: int) -> None:
        """Build it when it is met again in a later picture; the more often it was put off, the
        later.

        Args:
            reason: Why, in plain words.
            epoch: Now, as `KindRegistry.epoch` has it.
        """
        tries = self.tries + 1
        self.miss(reason)
        self.tries, self._waits_for = tries, epoch + min(2 ** (tries - 1), _LONGEST_PAUSE)

    def met(self, epoch: int) -> None:
        """A block of this kind is called and there is no graph."""
        if self._waits_for is not None and epoch >= self._waits_for:
            self._waits_for = None

    @property
    def waits(self) -> bool:
        """Whether it was put off, and was not met again since."""
        return self._waits_for is not None
