"""A kind of block at run time: its key, its graph once there is one, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch

from onediff_ext.core.keys import KindKey
from onediff_ext.engine.check import Comparison
from onediff_ext.engine.port import Graph


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
        export: Makes the exported program to build from, serialised.
    """

    key: KindKey
    label: str
    device: torch.device
    export: Callable[[], bytes]
    state: KindState = KindState.MISSING
    graph: Graph | None = None
    reason: str = ""
    source: str = ""  # "built" or "loaded"
    comparison: Comparison | None = None
    calls: int = 0
    blocks: set[int] = field(default_factory=set)

    def accept(self, graph: Graph, source: str) -> None:
        """Take a graph into use; its first run will be compared with eager."""
        self.graph, self.source, self.state = graph, source, KindState.UNCHECKED

    def fail(self, reason: str) -> None:
        """Run eager from now on, and say why."""
        self.graph, self.state, self.reason = None, KindState.FAILED, reason
