"""A block kind at run time: its key, its graph once there is one, and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from weakref import WeakSet

import torch
from torch import nn

from onediff_ext.core.forks import fork_safe_lock
from onediff_ext.core.kind_key import KindKey
from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.checking.compare_with_eager import Comparison
from onediff_ext.engine.quantization import Quantization

# A kind whose export fails again and again is retried after at most this many images.
_LONGEST_PAUSE = 16


class KindState(Enum):
    """Whether a kind's graph is in use."""

    MISSING = "missing"  # no graph yet: eager
    UNCHECKED = "unchecked"  # a graph that was not compared with eager in this process
    READY = "ready"
    FAILED = "failed"  # eager for the rest of the process, with a reason


class LiveBlocks:
    """The living blocks of one kind, held weakly: a host makes new ones for each checkpoint.

    The foreground thread adds blocks while other threads iterate.
    """

    def __init__(self) -> None:
        self._blocks: WeakSet[nn.Module] = WeakSet()
        self._lock = fork_safe_lock()

    def add(self, block: nn.Module) -> None:
        """Add a block of this kind.

        Args:
            block: The host's module. It leaves when nothing else holds it.
        """
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
        prepare_export: Prepares an export on a device (the kind's own or the CPU), and returns
            the function that makes the serialised program to build from.
        quantization: Which weights are 8-bit copies; None for none.
        work: Multiplications of one call at the size of the first call; orders builds.
        state: Whether its graph is in use.
        graph: The graph, once there is one.
        reason: Why its calls run eager, or "".
        source: ``"built"`` or ``"loaded"``, or "" without a graph.
        comparison: The first run's comparison with eager.
        is_coming: Whether its graph is loaded and comes into use with the next image.
        calls: Calls of its blocks.
        blocks: Its living blocks.
        tries: Exports that failed in this process since its last graph.
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
    source: str = ""
    comparison: Comparison | None = None
    is_coming: bool = False
    calls: int = 0
    blocks: LiveBlocks = field(default_factory=LiveBlocks)
    tries: int = 0
    _waits_for: int | None = None  # the epoch from which on a call allows another export

    @property
    def weight(self) -> float:
        """Work of all its calls so far; the largest is built first."""
        return self.calls * self.work

    def export(self) -> bytes:
        """Make the exported program to build from.

        Returns:
            The serialised program, without weights.

        Raises:
            ExportError: The block cannot be expressed as a graph.
        """
        return self.prepare_export(self.device)()

    def accept(self, graph: Graph, source: str) -> None:
        """Take a graph into use. Its first run is compared with eager.

        Args:
            graph: The loaded graph.
            source: ``"built"`` or ``"loaded"``.
        """
        self.graph, self.source, self.state = graph, source, KindState.UNCHECKED
        self.reason, self.is_coming = "", False
        self.tries, self._waits_for = 0, None

    def fail(self, reason: str) -> None:
        """Run eager for the rest of the process.

        Args:
            reason: The eager reason, in plain words.
        """
        self.graph, self.state, self.reason = None, KindState.FAILED, reason
        self.is_coming = False

    def miss(self, reason: str) -> None:
        """Run eager until there is a graph again.

        Args:
            reason: The eager reason, in plain words.
        """
        self.graph, self.state, self.reason, self.source = None, KindState.MISSING, reason, ""
        self.is_coming = False
        self.tries, self._waits_for = 0, None

    def retry_later(self, reason: str, epoch: int) -> None:
        """Build it when it is met again in a later picture; the more often it was put off, the
        later.

        Args:
            reason: The eager reason, in plain words.
            epoch: The present `KindRegistry.epoch`.
        """
        tries = self.tries + 1
        self.miss(reason)
        self.tries, self._waits_for = tries, epoch + min(2 ** (tries - 1), _LONGEST_PAUSE)

    def met(self, epoch: int) -> None:
        """Note a call without a graph; ends the pause of `retry_later` when its time is over.

        Args:
            epoch: The present `KindRegistry.epoch`.
        """
        if self._waits_for is not None and epoch >= self._waits_for:
            self._waits_for = None

    @property
    def waits(self) -> bool:
        """Whether the pause of `retry_later` lasts."""
        return self._waits_for is not None
