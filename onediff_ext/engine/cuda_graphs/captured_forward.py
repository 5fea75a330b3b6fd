"""A model's forward, replayed as a CUDA graph where that is safe."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from onediff_ext.core.errors import CaptureError, WeightsChangedError
from onediff_ext.engine.checking.compare_with_eager import compare
from onediff_ext.engine.cuda_graphs.cache import CapturedGraph, CudaGraphCache
from onediff_ext.engine.cuda_graphs.forward_call import ForwardCall, read_call
from onediff_ext.engine.cuda_graphs.memory_reads import owned, record_and_look
from onediff_ext.engine.cuda_graphs.oom_fallback import OomFallback, Retry
from onediff_ext.engine.cuda_graphs.recorder import Recorder
from onediff_ext.engine.cuda_graphs.staleness import Snapshot, TrustedModules
from onediff_ext.engine.cuda_graphs.text_kv_graph import TextKvGraph, readers
from onediff_ext.engine.running.block_runner import BlockRunner
from onediff_ext.engine.torch_versions import OutOfMemoryError

logger = logging.getLogger(__name__)

# A capture is compared with the model itself on the call that it was made for and on the next
# one, whose inputs differ: what depends on them without being an input shows then. A model that
# has shown it at one size need not at the others, where a comparison costs a forward too.
_CHECKS = 2
# Captures in a row that were dropped before they had paid: somebody changes the model at every
# call, and recording costs more than it brings. It is tried again after so many calls, and each
# time after twice as many.
_WASTED_LIMIT = 4
_WORTH_REPLAYS = 3
_PAUSE_CALLS = 32
# Variants whose snapshots are kept; each has a list of all that a model consists of.
_SNAPSHOTS = 8


class CapturedForward:
    """Stands for a model's own forward, and calls it whenever no capture can.

    The first call of a shape runs as always, the second is recorded after it has run, and
    those after it are replayed, as long as the model is what it was. Once a shape has passed all
    comparisons, others are recorded with their first call.

    Args:
        model: The host's module.
        forward: Its forward until now.
        runners: The runners of its blocks.
        captures: Where captures are kept.
        known: What its modules may be.
        share: How much of a larger model's forward it is.

    Attributes:
        model: The host's module.
        eager: Its forward until now.
        active: False lets every call through.
        variant: What else decides the computation, set by whoever changes it between calls. The
            model may consist of other modules in each variant.
        keeps: What a capture of this variant has to keep alive, set together with it.
        reason: Why sizes like the last call's are not replayed, or "".
        replayed: Whether the last call was replayed, and needed no comparison any more.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        runners: Sequence[BlockRunner],
        captures: CudaGraphCache,
        known: TrustedModules,
        share: float = 1.0,
    ) -> None:
        self.model, self.eager, self._runners = model, forward, runners
        self._captures, self._known, self._share = captures, known, share
        self._within_memory = OomFallback(forward, captures, self._retry)
        self._snapshots: OrderedDict[Hashable, Snapshot] = OrderedDict()
        # Per variant and form: what merged weights and 8-bit copies would have been made from
        # outside of the model's forward, and were made from within, at its last run in Python.
        self._derived: dict[Hashable, tuple[object, object]] = {}
        # The captures own them: when these go, so does the memory of all recordings.
        self._prompts: WeakValueDictionary[Hashable, TextKvGraph] = WeakValueDictionary()
        self._seen: set[Hashable] = set()
        self._refused: dict[Hashable, str] = {}
        # Per variant: what the model was when a capture of it had passed all comparisons.
        self._proved: dict[Hashable, tuple[Snapshot, list[object]]] = {}
        self._wasted = self._paused = 0
        self._pause = _PAUSE_CALLS
        self.active = True
        self.variant: Hashable = None
        self.keeps: object = None
        self.reason = ""
        self.replayed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.eager, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.replayed = False
        if not self.active:
            return self.eager(*args, **kwargs)
        call = read_call(args, kwargs)
        if isinstance(call, str) or (reason := self._captures.unavailable_reason(call.device)):
            self.reason = call if isinstance(call, str) else str(reason)
            return self._within_memory(*args, **kwargs)
        key = (id(self.model), self.variant, call.key)
        with self._captures.lock, self._captures.order.after_the_last(call.device):
            capture = self._captures.find(key)
            if capture is not None:
                found = self._replayed(key, call, capture, args, kwargs)
                if found is not None:
                    return found[0]
                capture = None  # and what it owned, the prompt's part, goes with it
            compared = self._compared()
            output = self._within_memory(*args, **kwargs)
            self._note_derived(call.form)
            if self._captures.find(key) is not None:
                self.reason = ""  # it was out of date, and is right again
            elif compared == self._compared():
                self._consider(key, call, output)
            else:  # and what was compared is eager's here, which a replay would not give
                self._seen.add(key)
                self.reason = "new graphs are being compared with eager"
            return output

    def _replayed(
        self,
        key: Hashable,
        call: ForwardCall,
        capture: CapturedGraph,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any] | None:
        """The output of a replay; None if the forward has to run.

        Looking at all that the capture froze takes time, in which the replay can
        be on its way: what it reads is kept alive by the capture, or lies where it did. Whatever
        is launched behind a replay waits until the driver has launched all of that.
        """
        if capture.snapshot.weights_lie_where_they_did():
            capture.fill(call.tensors)
            capture.recording.replay()
            if self._unchanged(capture):
                if not self._is_derived_from_the_same(call.form):
                    return None  # the forward makes them again, in the same places
                if self._derived_places() == capture.derived_places:
                    # A copy, since the next replay of any capture writes over it.
                    output = pytree.tree_map_only(
                        torch.Tensor, torch.clone, capture.recording.output
                    )
                    return (self._judged(key, call.form, capture, output, args, kwargs),)
        else:
            # All captures of these weights keep alive what they alone still read.
            self._captures.drop_snapshot(capture.snapshot, "the model's weights have moved")
        self._waste(capture)
        self._captures.drop(key, "the model has changed")
        self._seen.add(key)
        return None

    def forget(self) -> None:
        """Drop this model's captures."""
        with self._captures.lock:
            self._captures.drop_model(id(self.model))
            self._seen.clear()
            self._refused.clear()
            self._proved.clear()
            self._snapshots.clear()
            self._derived.clear()

    def _judged(
        self,
        key: Hashable,
        form: Hashable,
        capture: CapturedGraph,
        output: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What a replay gave, or the forward's own result while the replay is being checked."""
        capture.replays += 1
        if capture.replays == _WORTH_REPLAYS:
            self._wasted, self._pause = 0, _PAUSE_CALLS
        spot_checks = self._captures.spot_checks
        if capture.checks >= _CHECKS:
            self.reason, self.replayed = "", True
            if spot_checks.chosen is None or spot_checks.chosen not in self._runners:
                return output
            with spot_checks.comparing():
                expected = self._within_memory(*args, **kwargs)
                self._check(key, capture, output, expected, in_use=True)
            return expected
        expected = self._within_memory(*args, **kwargs)
        self._check(key, capture, output, expected)
        if capture.checks >= _CHECKS:
            self._proved[self.variant, form] = (capture.snapshot, capture.graphs)
        return expected

    def _consider(self, key: Hashable, call: ForwardCall, output: Any) -> None:
        """Record this shape, if it was seen before and nothing speaks against it."""
        if key in self._refused:
            self.reason = self._refused[key]
            return
        proof = self._proved.get((self.variant, call.form))
        if key not in self._seen and proof is None:
            self._is_new(key)
            return
        self.reason = self._why_not() or ""
        if self.reason:
            return
        state = self._snapshot(), self._graphs()
        if key not in self._seen and not _same_state(proof, state):
            self._is_new(key)
            return
        try:
            capture = self._captures.record(
                key, lambda r: self._record(r, call, output, *state), call.device, self._share
            )
        except WeightsChangedError as exc:
            self.reason = exc.message
            return
        except CaptureError as exc:
            if isinstance(exc.__cause__, WeightsChangedError):
                self.reason = exc.__cause__.message
            else:
                self._refuse(key, f"cannot be captured: {exc.message}")
            return
        except OutOfMemoryError:
            self._give_up(key)
            return
        capture.fill(call.tensors)
        capture.recording.replay()
        self._check(key, capture, capture.recording.output, output)

    def _is_new(self, key: Hashable) -> None:
        self._seen.add(key)
        self.reason = "this size is new"

    def _record(
        self,
        recorder: Recorder,
        call: ForwardCall,
        output: Any,
        snapshot: Snapshot,
        graphs: list[object],
    ) -> CapturedGraph:
        prompts = {}
        if self._is_derived_from_the_same(call.form):
            prompts = {
                i: self._prompt_part(recorder, call, i, runners, snapshot)
                for i, runners in readers(self._runners, call.tensors).items()
                if all(_projects_outside(runner) for runner in runners)
            }
        slots = self._captures.slots
        inputs = [
            prompts[i].source if i in prompts else slots.take(i, tensor, call.device)
            for i, tensor in enumerate(call.tensors)
        ]
        outputs = [
            slots.take(i, tensor, tensor.device)
            for i, tensor in enumerate(_tensors(output), len(inputs))
        ]
        for target, source in zip(inputs, call.tensors, strict=True):
            target.copy_(source)

        def forward() -> Any:
            args, kwargs = call.arguments(inputs)  # Forge's UNet empties the lists of a ControlNet
            with ExitStack() as stack:
                for part in prompts.values():
                    stack.enter_context(part.pinned())
                found = self.eager(*args, **kwargs)
            for target, source in zip(outputs, _tensors(found), strict=True):
                target.copy_(source)
            given = iter(outputs)
            return pytree.tree_map_only(torch.Tensor, lambda _: next(given), found)

        recording, reads = record_and_look(recorder, forward, call.device)
        capture = CapturedGraph(
            recording,
            inputs,
            snapshot,
            graphs,
            prompts,
            owned(reads, snapshot.places(), [*inputs, *outputs]),
            self._derived_places(),
            self.keeps,
            share=self._share,
        )
        if _same_state(self._proved.get((self.variant, call.form)), (snapshot, graphs)):
            capture.checks = _CHECKS - 1
        return capture

    def _prompt_part(
        self,
        recorder: Recorder,
        call: ForwardCall,
        index: int,
        runners: Sequence[BlockRunner],
        snapshot: Snapshot,
    ) -> TextKvGraph:
        """What all sizes share, as long as the model is the same."""
        prompt = call.tensors[index]
        key = (self.variant, index, prompt.shape, call.form)
        part = self._prompts.get(key)
        if part is None or not part.serves(snapshot, runners):
            part = TextKvGraph(recorder, prompt, runners, snapshot, call.device)
            self._prompts[key] = part
        return part

    def _check(
        self,
        key: Hashable,
        capture: CapturedGraph,
        found: Any,
        expected: Any,
        *,
        in_use: bool = False,
    ) -> None:
        for ours, theirs in zip(_tensors(found), _tensors(expected), strict=True):
            try:
                comparison = compare(ours, theirs)
            except OutOfMemoryError:  # which must not cost the picture
                self._give_up(key)
                return
            if comparison.problem is not None:
                self._proved.clear()
                self._captures.drop(key, f"a replay {comparison.problem}")
                self._refuse(key, f"a replay {comparison.problem}")
                if in_use:
                    self._captures.found_wrong(type(self.model).__name__, self.reason)
                return
            if not comparison.decided:
                return
        capture.checks += 1

    def _why_not(self) -> str | None:
        if self._wasted >= _WASTED_LIMIT:
            self._paused += 1
            if self._paused < self._pause:
                return "something changes the model at every call"
            self._wasted, self._paused, self._pause = _WASTED_LIMIT - 1, 0, 2 * self._pause
        snapshot = self._snapshots.get(self.variant)
        if snapshot is None or (snapshot.refusal_reason and not snapshot.holds()):
            snapshot = self._new_snapshot()
        return snapshot.refusal_reason

    def _unchanged(self, capture: CapturedGraph) -> bool:
        if self._graphs() == capture.graphs and capture.snapshot.holds():
            return True
        self._snapshots.clear()
        return False

    def _retry(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Retry:
        return retry_of(self._snapshot(), args, kwargs)

    def _snapshot(self) -> Snapshot:
        """Of what the model is now."""
        known = self._snapshots.get(self.variant)
        return known if known is not None and known.holds() else self._new_snapshot()

    def _new_snapshot(self) -> Snapshot:
        snapshot = Snapshot(self.model, self._known)
        self._snapshots[self.variant] = snapshot
        if len(self._snapshots) > _SNAPSHOTS:
            self._snapshots.popitem(last=False)
        return snapshot

    def _derived_now(self) -> tuple[object, object]:
        runners = [runner for runner in self._runners if runner.derives]
        now = [runner.derived_from_now() for runner in runners]
        return now, [runner.derived_from() for runner in runners]

    def _note_derived(self, form: Hashable) -> None:
        self._derived[self.variant, form] = self._derived_now()

    def _is_derived_from_the_same(self, form: Hashable) -> bool:
        """Whether merged weights and 8-bit copies are what the forward would make of the model
        now. It may change a LoRA's scale on its way in, and back on its way out."""
        return self._derived.get((self.variant, form)) == self._derived_now()

    def _derived_places(self) -> list[object]:
        return [runner.derived_places() for runner in self._runners]

    def _graphs(self) -> list[object]:
        """What each block runs through now: an eager block that has got a graph is a change."""
        return [
            (runner.active, runner.tree, runner.used, runner.used.graph if runner.used else None)
            for runner in self._runners
        ]

    def _compared(self) -> int:
        return sum(runner.compared for runner in self._runners)

    def _waste(self, capture: CapturedGraph) -> None:
        # New graphs are no reason to stop: they come to an end.
        if capture.replays < _WORTH_REPLAYS and self._graphs() == capture.graphs:
            self._wasted += 1

    def _give_up(self, key: Hashable) -> None:
        self._captures.drop_all("memory is short")
        self._refuse(key, "no memory for a capture of this size")

    def _refuse(self, key: Hashable, reason: str) -> None:
        self._refused[key] = self.reason = reason
        logger.info("%s runs without a capture: %s", type(self.model).__name__, reason)


def retry_of(snapshot: Snapshot, args: Sequence[Any], kwargs: dict[str, Any]) -> Retry:
    """How a forward of this model may be tried again when it ran out of memory."""
    if snapshot.refusal_reason is not None:
        return Retry.NOT
    known = not isinstance(read_call(args, kwargs), str)
    return Retry.IN_HALVES if known and snapshot.is_per_image else Retry.WHOLE


def _same_state(
    ours: tuple[Snapshot, list[object]] | None, theirs: tuple[Snapshot, list[object]]
) -> bool:
    return ours is not None and ours[0] is theirs[0] and ours[1] == theirs[1]


def _projects_outside(runner: BlockRunner) -> bool:
    """Whether what a block makes of a prompt is the same within the model's forward and outside
    of it."""
    now, made = runner.derived_from_now(), runner.derived_from()
    return not runner.derives or now == made


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
