"""Records a model's forward of one shape as a CUDA graph with static buffers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from onediff_ext.core.errors import CaptureError
from onediff_ext.engine.blocks.weight_slots import WrapperRule
from onediff_ext.engine.cuda_graphs.attribute_rollback import AttributeRollback, scales_of_call
from onediff_ext.engine.cuda_graphs.cache import CapturedGraph
from onediff_ext.engine.cuda_graphs.forward_call import ForwardCall, tensors_of
from onediff_ext.engine.cuda_graphs.memory_reads import (
    MemoryReads,
    owned_storages,
    record_and_observe,
)
from onediff_ext.engine.cuda_graphs.model_tracker import FrozenState, ModelTracker
from onediff_ext.engine.cuda_graphs.recorder import Recorder
from onediff_ext.engine.cuda_graphs.static_buffers import StaticBuffers
from onediff_ext.engine.cuda_graphs.text_kv_graph import TextKvGraph, readers
from onediff_ext.engine.running.block_runner import BlockRunner

_LEAVES_TENSORS = "its forward puts new tensors into the model ({})"


class ForwardRecorder:
    """Records forwards of one model. All sizes share the text KV graphs.

    Args:
        model: The host's module.
        forward: Its own forward.
        runners: The runners of its blocks.
        tracker: Tracks the model.
        rules: Wrappers around layers of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        runners: Sequence[BlockRunner],
        tracker: ModelTracker,
        rules: Sequence[WrapperRule] = (),
    ) -> None:
        self._model, self._forward, self._rules = model, forward, rules
        self._runners, self._tracker = runners, tracker
        # The CUDA graphs own them: memory of all recordings is released together.
        self._text_kv_graphs: WeakValueDictionary[Hashable, TextKvGraph] = WeakValueDictionary()

    def record(
        self,
        recorder: Recorder,
        buffers: StaticBuffers,
        call: ForwardCall,
        output: Any,
        frozen: FrozenState,
        variant: Hashable,
    ) -> CapturedGraph:
        """Record one forward.

        Args:
            recorder: Makes the recordings.
            buffers: What the recording reads and writes.
            call: The arguments; the forward has run with them.
            output: The forward's output for them.
            frozen: What the model is.
            variant: As `CapturedForward.variant`.

        Returns:
            The CUDA graph. Its outputs hold nothing before the first replay.

        Raises:
            CaptureError: It cannot be recorded, or it puts new tensors into attributes of the
                model, which are put back.
            torch.OutOfMemoryError: As `Recorder.record`.
            ModelChangedError: A block's weights no longer have the form that its graph reads.
        """
        streamed = frozen.snapshot.streamed_storages(call.device) or frozenset()
        text_kv_graphs = {}
        if self._tracker.has_current_derived_weights((variant, call.form), frozen):
            text_kv_graphs = {
                i: self._text_kv_graph(recorder, call, i, runners, frozen, variant, streamed)
                for i, runners in readers(self._runners, call.tensors).items()
                if all(_projects_outside(runner) for runner in runners)
            }
        inputs = [
            text_kv_graphs[i].source
            if i in text_kv_graphs
            else buffers.take(i, tensor, call.device)
            for i, tensor in enumerate(call.tensors)
        ]
        outputs = [
            buffers.take(i, tensor, tensor.device)
            for i, tensor in enumerate(tensors_of(output), len(inputs))
        ]
        for target, source in zip(inputs, call.tensors, strict=True):
            target.copy_(source)

        def forward() -> Any:
            args, kwargs = call.arguments(inputs)  # a UNet may empty its lists
            with ExitStack() as stack:
                for part in text_kv_graphs.values():
                    stack.enter_context(part.pinned())
                found = self._forward(*args, **kwargs)
            for target, source in zip(outputs, tensors_of(found), strict=True):
                target.copy_(source)
            given = iter(outputs)
            return pytree.tree_map_only(torch.Tensor, lambda _: next(given), found)

        # Nothing is computed while a recording is made: a tensor that it leaves in the model holds
        # nothing, and one that fails may leave scales changed.
        before = AttributeRollback(self._model, self._rules)
        scales = scales_of_call(self._model, self._rules, *call.arguments(call.tensors))
        reads = MemoryReads(call.device, streamed)
        try:
            recording = record_and_observe(recorder, forward, reads)
        except BaseException as exc:
            left = before.restore_tensors(reads.has_made)
            scales.restore()
            if left and isinstance(exc, CaptureError):
                raise CaptureError(_LEAVES_TENSORS.format(left)) from exc
            raise
        if left := before.restore_tensors(reads.has_made):
            raise CaptureError(_LEAVES_TENSORS.format(left))
        places = frozen.snapshot.places()
        return CapturedGraph(
            recording,
            inputs,
            frozen,
            text_kv_graphs,
            owned_storages(reads, places, [*inputs, *outputs]),
            self._tracker.derived_places(),
        )

    def _text_kv_graph(
        self,
        recorder: Recorder,
        call: ForwardCall,
        index: int,
        runners: Sequence[BlockRunner],
        frozen: FrozenState,
        variant: Hashable,
        streamed: frozenset[int],
    ) -> TextKvGraph:
        """The text KV graph of one argument, shared by all sizes while the model is the same."""
        prompt = call.tensors[index]
        key = (variant, index, prompt.shape, call.form)
        graph = self._text_kv_graphs.get(key)
        if graph is None or not graph.serves(frozen.snapshot, runners):
            graph = TextKvGraph(recorder, prompt, runners, frozen.snapshot, call.device, streamed)
            self._text_kv_graphs[key] = graph
        return graph


def _projects_outside(runner: BlockRunner) -> bool:
    """Whether a block's keys and values of a prompt are the same within and outside of the model's
    forward."""
    now, made = runner.weights.derived_from_now(), runner.weights.derived_from()
    return not runner.weights.has_derived or now == made
