"""A kind of block at run time: its key, its graph once there is one, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from weakref import WeakSet

import torch
from torch import nn

from onediff_ext.core.keys import KindKey
from onediff_ext.engine.check import Comparison
from onediff_ext.engine.port import Graph
from onediff_ext.engine.quantised import Quantisation


class KindState(Enum):
    """Where a kind stands."""

    MISSING = "missing"  # no graph yet: eager
    UNCHECKED = "unchecked"  # a graph, not yet compared with eager in this process
    READY = "ready"
    FAILED = "failed"  # eager for good, with a reason


@dataclass(eq=False)
class Kind:
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
    quantisation: Quantisation | None = None
    work: float = 0.0
    state: KindState = KindState.MISSING
    graph: Graph | None = None
    reason: str = ""
    source: str = ""  # "built" or "loaded"
    comparison: Comparison | None = None
    is_coming: bool = False  # its graph is loaded, and used from the next picture on
    calls: int = 0
    # Those that are alive: a host makes new blocks for each checkpoint.
    blocks: WeakSet[nn.Module] = field(default_factory=WeakSet)

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

    def fail(self, reason: str) -> None:
        """Run eager from now on, and say why."""
        self.graph, self.state, self.reason = None, KindState.FAILED, reason
        self.is_coming = False

    def miss(self, reason: str) -> None:
        """Run eager until there is a graph again, and say why."""
        self.graph, self.state, self.reason, self.source = None, KindState.MISSING, reason, ""
        self.is_coming = False
