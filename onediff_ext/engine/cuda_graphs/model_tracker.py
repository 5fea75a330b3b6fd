"""The state of a model that a CUDA graph of its forward depends on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.cuda_graphs.derived_stamp import DerivedStamp
from onediff_ext.engine.cuda_graphs.staleness import Snapshot
from onediff_ext.engine.cuda_graphs.trusted_modules import TrustedModules
from onediff_ext.engine.running.block_runner import BlockRunner, epoch_of

# Variants whose snapshots are kept; each holds a list of everything that a model consists of.
_MAX_SNAPSHOTS = 8

# Of a block: whether its runner is active, the block as it is, its kind, and the kind's graph.
BlockGraph = tuple[bool, BlockTree | None, BlockKind | None, Graph | None]


@dataclass(frozen=True, eq=False)
class FrozenState:
    """The state of a model that a CUDA graph freezes.

    Args:
        snapshot: Modules, code and places of the weights.
        graphs: What each block runs through, from `ModelTracker.graphs`.
    """

    snapshot: Snapshot
    graphs: list[BlockGraph]

    def is_same_as(self, other: FrozenState | None) -> bool:
        """Whether a graph of one state stands for a graph of the other, wherever weights lie.

        Args:
            other: Another state; None is never the same.
        """
        return (
            other is not None
            and self.snapshot.origin is other.snapshot.origin
            and self.graphs == other.graphs
        )


class ModelTracker:
    """Tracks one model: its modules and code, the graphs of its blocks, its derived weights.

    Derived weights are made from others: weights with a LoRA merged into them, and 8-bit copies.

    Args:
        model: The host's module.
        runners: The runners of its blocks.
        trusted: What its modules may be.
        is_private: Nobody else has the model: only the graphs of its blocks change by themselves.
    """

    def __init__(
        self,
        model: nn.Module,
        runners: Sequence[BlockRunner],
        trusted: TrustedModules,
        is_private: bool = False,
    ) -> None:
        self._model, self._runners, self._trusted = model, runners, trusted
        self._is_private = is_private
        self._snapshots: OrderedDict[Hashable, Snapshot] = OrderedDict()
        self._refused_in: dict[Hashable, int | None] = {}  # epoch of the last check, by variant
        # By form of a call: what derived weights had been made from after its last run in Python,
        # as seen from outside and from within the model's forward.
        self._derived: dict[Hashable, tuple[object, object]] = {}
        # While the stamp of a snapshot holds, the forms that were found to have current derived
        # weights have them still.
        self._stamps: WeakKeyDictionary[Snapshot, tuple[DerivedStamp, set[Hashable]]]
        self._stamps = WeakKeyDictionary()

    def snapshot(self, variant: Hashable) -> Snapshot:
        """Return a snapshot of what the model is now.

        Args:
            variant: As `CapturedForward.variant`.

        Returns:
            The last snapshot of this variant while it holds, also after the weights have moved;
            otherwise a new one.
        """
        known = self._snapshots.get(variant)
        if known is not None and known.merged == self._merged_wrappers():
            if known.holds():
                return known
            moved = known.at_new_places()
            if moved is not None:
                self._snapshots[variant] = moved
                return moved
        return self._new_snapshot(variant)

    def frozen(self, variant: Hashable) -> FrozenState:
        """Return the state that a CUDA graph recorded now would freeze.

        Args:
            variant: As `CapturedForward.variant`.
        """
        return FrozenState(self.snapshot(variant), self.graphs())

    def refusal_reason(self, variant: Hashable) -> str | None:
        """Return why a CUDA graph of this model would be unsafe, or None.

        A snapshot that refuses nothing is not checked again here: `frozen` does that. One that does
        is checked once in an image, since it takes as long as some blocks.

        Args:
            variant: As `CapturedForward.variant`.
        """
        snapshot, epoch = self._snapshots.get(variant), epoch_of(self._runners)
        if snapshot is None:
            snapshot = self._new_snapshot(variant)
        elif snapshot.refusal_reason and (epoch is None or epoch != self._refused_in.get(variant)):
            snapshot = snapshot if snapshot.holds() else self._new_snapshot(variant)
        if snapshot.refusal_reason:
            self._refused_in[variant] = epoch
        return snapshot.refusal_reason

    def is_still(self, state: FrozenState) -> bool:
        """Whether the model is in this state.

        If more than the graphs of its blocks has changed, all snapshots are made again.

        Args:
            state: From `frozen`, kept by a CUDA graph.
        """
        if not self.has_graphs_of(state):
            return False  # `snapshot` compares the rest
        if self._is_private or state.snapshot.holds(epoch_of(self._runners)):
            return True
        self._snapshots.clear()
        return False

    def graphs(self) -> list[BlockGraph]:
        """The graph of each block now. A block that was eager and now has a graph differs."""
        return [
            (runner.active, runner.tree, runner.used, runner.used.graph if runner.used else None)
            for runner in self._runners
        ]

    def has_graphs_of(self, state: FrozenState) -> bool:
        """Whether each block's graph in this state is the graph of the block's kind still.

        Since then a block may have run through a graph of another kind, such as one with a mask.

        Args:
            state: From `frozen`, kept by a CUDA graph.
        """
        return len(state.graphs) == len(self._runners) and all(
            runner.active == active
            and runner.tree is tree
            and (runner.used is None if used is None else _is_graph_of(used, graph, runner))
            for runner, (active, tree, used, graph) in zip(self._runners, state.graphs, strict=True)
        )

    def comparisons(self) -> int:
        """How many block graphs have been compared with eager so far."""
        return sum(runner.compared for runner in self._runners)

    def note_derived(self, form: Hashable) -> None:
        """Remember what the forward that just ran in Python made its derived weights from.

        Args:
            form: Variant and `ForwardCall.form` of the call.
        """
        self._derived[form] = self._derived_now()
        for _, current in self._stamps.values():
            current.discard(form)

    def has_current_derived_weights(self, form: Hashable, state: FrozenState) -> bool:
        """Whether the forward would make the same derived weights of the model as it is now.

        The forward may change a LoRA's scale at its start and back at its end.

        Args:
            form: As `note_derived` had it.
            state: One that `is_still` the model's.
        """
        stamp, current = self._stamps.get(state.snapshot, (None, set()))
        if stamp is not None and not stamp.holds(epoch_of(self._runners)):
            stamp = None
        if stamp is not None and form in current:
            return True
        if self._derived.get(form) != self._derived_now():
            return False
        if stamp is None:
            current = set()
            stamp = DerivedStamp([runner.weights for runner in self._runners])
            self._stamps[state.snapshot] = stamp, current
        current.add(form)
        return True

    def derived_places(self) -> list[object]:
        """Where the derived weights of each block lie."""
        return [runner.weights.merged_addresses() for runner in self._runners]

    def forget(self) -> None:
        """Drop everything that was seen of the model."""
        self._snapshots.clear()
        self._refused_in.clear()
        self._derived.clear()
        self._stamps.clear()

    def _new_snapshot(self, variant: Hashable) -> Snapshot:
        snapshot = Snapshot(self._model, self._trusted, self._merged_wrappers())
        self._snapshots[variant] = snapshot
        if len(self._snapshots) > _MAX_SNAPSHOTS:
            self._snapshots.popitem(last=False)
        return snapshot

    def _merged_wrappers(self) -> frozenset[int]:
        """Ids of the wrappers of all blocks that run through their graphs."""
        return frozenset(
            id(slot.wrapper)
            for runner in self._runners
            if runner.active and runner.used is not None and runner.used.graph is not None
            for slot in runner.weights.wrapped_slots
        )

    def _derived_now(self) -> tuple[object, object]:
        runners = [runner for runner in self._runners if runner.weights.has_derived]
        now = [runner.weights.derived_from_now() for runner in runners]
        return now, [runner.weights.derived_from() for runner in runners]


def _is_graph_of(kind: BlockKind, graph: Graph | None, runner: BlockRunner) -> bool:
    return runner.used is not None and kind.graph is graph
