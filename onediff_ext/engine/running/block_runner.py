"""Runs a block in place of its own forward: its kind's graph, or eager with a reason."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from onediff_ext.core.errors import MachineError, ModelChangedError
from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.blocks.block_kind import BlockKind, KindState
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.family import BlockCall, BlockFamily, Refusal, Tensors
from onediff_ext.engine.blocks.kind_registry import KindRegistry
from onediff_ext.engine.blocks.prompt_recipe import Done
from onediff_ext.engine.class_methods import ClassMethod
from onediff_ext.engine.graph_calls import is_observed, run_graph
from onediff_ext.engine.out_of_memory import is_out_of_memory
from onediff_ext.engine.running.block_weights import BlockWeights
from onediff_ext.engine.running.call_signature import (
    autocast_state,
    boundary_reason,
    normalise,
    precision_of,
    signature,
)
from onediff_ext.engine.running.gated_attention import GatedAttention
from onediff_ext.engine.running.graph_check import GraphCheck
from onediff_ext.engine.running.kind_lookup import find_kind
from onediff_ext.engine.running.streamed_weights import KeptRefusal, StreamedWeights, tree_refusal
from onediff_ext.engine.running.text_kv import BlockTextKv
from onediff_ext.engine.stand_in import StandIn
from onediff_ext.engine.torch_versions import OutOfMemoryError, is_dynamo_tracing
from onediff_ext.engine.validity.left_wrappers import LeftWrapper
from onediff_ext.engine.validity.surroundings import Surroundings

logger = logging.getLogger(__name__)

# Eager reasons of calls whose kind has no fault.
NO_GRAPH_YET = "there is no graph yet"
NOT_COMPARED = "no memory yet to compare its graph with eager"
UNDECIDED = "its graph could not be compared: eager gave NaN"

_INDEX_LIMIT = 2**31 - 1


class _Prepared(NamedTuple):
    """A call that a graph may serve: its kind, its arguments, the block's weights."""

    kind: BlockKind
    call: BlockCall
    weights: list[torch.Tensor]
    copied_from: BlockTree | None  # whose weights the graph gets copies of, made for this call


class BlockRunner(StandIn):
    """Runs one block of a host's model.

    It is an instance attribute of the block, in place of ``forward`` or of the method that the
    family names. Hooks on the block keep working.

    Args:
        block: The host's module.
        family: The family of the block's class.
        forward: The method that the runner replaces, bound.
        registry: Holds the kinds of this process.
        surroundings: What runs between the blocks of the model; None for a block by itself.

    Attributes:
        replaced: The method that another extension had put on the block before; None when it was
            that of the block's class.
        active: False passes every call to eager.
        used: The kind of the last call; None when the call ran eager for a reason of its own.
        eager_reason: Why the last call ran eager; None if it ran its graph, "" before the first.
        compared: Number of calls that ran a graph and returned eager's result, to compare them.
        weights: Reads the block's weights.
        text_kv: Computes keys and values of the prompt ahead of the graph.
        done: Says when the block's work was done before the forward (`PromptWork`): the block then
            returns its first argument. None for most blocks.
        attention: Its cross-attention while a forward of a picture with a gate runs; else None.
    """

    capturable = True  # calls with equal shapes run the same kernels

    def __init__(
        self,
        block: nn.Module,
        family: BlockFamily,
        forward: Callable[..., Any],
        registry: KindRegistry,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.block, self.family, self._registry = block, family, registry
        own = getattr(type(block), family.method)
        bound = getattr(forward, "__func__", None), getattr(forward, "__self__", None)
        self.replaced = None if bound == (own, block) else forward  # it may be another block's
        self._own = ClassMethod(block, family.method)
        self._left = LeftWrapper.of(block, family.method, self.replaced)
        self.active = True
        self.compared = 0
        self.used: BlockKind | None = None
        self.eager_reason: str | None = ""
        self.weights = BlockWeights(registry)
        self.text_kv = BlockTextKv(block, family, self.weights, registry)
        self._streamed = StreamedWeights(family, registry.budget)
        self.done: Done | None = None
        self.attention: GatedAttention | None = None
        self._surroundings = surroundings
        if surroundings is not None:
            surroundings.add(block, family.method)
        self._check = GraphCheck(family, registry)
        self._found: dict[Hashable, BlockKind] = {}
        # Of the last call without a graph: the epoch, and whether cross-attention was computed.
        self._missing_in: tuple[int, bool] | None = None
        self._refused = KeptRefusal()
        self._must_compare = False  # wrappers of another extension are around the block's layers

    @property
    def eager(self) -> Callable[..., Any]:
        """The method that runs in place of a graph.

        It is the instance's method that the runner replaced, or else the class's (`ClassMethod`).
        """
        own = self._own.bound if self.replaced is None else self.replaced
        return own if self.attention is None else partial(self.attention.run, own)

    def follow_class(self) -> None:
        """Follow the block's class again, when the runner is installed once more."""
        self._own.follow()

    def show_class(self) -> None:
        """As `ClassMethod.show`."""
        self._own.show()

    @property
    def tree(self) -> BlockTree | None:
        """The block at the last call; None before the first."""
        return self.weights.tree

    @property
    def epoch(self) -> int:
        """The epoch of the kinds; see `KindRegistry.epoch`."""
        return self._registry.epoch

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        # A copied model has weights of its own. Its blocks run their own forward, eager.
        return copy.deepcopy(self._own.bound if self.replaced is None else self.replaced, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_tracing():
            return (self._own if self.replaced is None else self.replaced)(*args, **kwargs)
        self._own.keep_if_taken(self)
        if self.done is not None and self.done.now:
            return args[0]
        is_kept = self.attention is not None and self.attention.keeps
        if not self.active or is_kept or self._is_still_missing():
            return self.eager(*args, **kwargs)
        try:
            prepared = self._refused.still(self.epoch) or self._prepare(args, kwargs)
        except Exception as exc:
            return self._run_after(exc, args, kwargs)
        if isinstance(prepared, Refusal):
            self._refused.keep(prepared, self.epoch)
            if not prepared.is_known_code:
                self._registry.code.doubt()  # other extensions' code may run now
            return self._run_unserved(prepared.reason, args, kwargs)
        kind = self.used = prepared.kind
        kind.calls += 1
        graph = kind.graph  # read once: other threads take graphs away
        if graph is None:
            self._note_missing(kind)
            return self.eager(*args, **kwargs)
        return self._run(graph, prepared, args, kwargs)

    def _run_after(self, exc: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run eager after an error outside of the graph, which must not end an image.

        It comes from a host of another version, or from objects of other extensions. The host's
        own errors, such as a layer's, come again from eager. It is raised again if memory ran out,
        or if a recording failed.
        """
        if is_observed() or isinstance(exc, OutOfMemoryError):
            raise exc
        logger.warning("%s runs eager", self.family.label, exc_info=True)
        reason = f"it cannot be looked at: {type(exc).__name__}: {exc}"
        return self._run_unserved(reason, args, kwargs)

    def _run_unserved(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run eager for a reason of this call's."""
        self.used, self.eager_reason = None, reason
        self._registry.fell_back(self.family.label, reason)
        return self.eager(*args, **kwargs)

    def _run(
        self, graph: Graph, prepared: _Prepared, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the kind's graph, and compare it with eager where that is due.

        A comparison waits for the GPU, which ends a recording.
        """
        kind, call, weights, tree = prepared
        if kind.state is not KindState.READY and is_observed():
            raise ModelChangedError("A graph came in since the forward before it.")
        outputs: Tensors | None = None
        try:
            unread = () if call.prompt is None else self.text_kv.layers
            call = self.text_kv.graph_call(call, weights)
            if tree is not None:
                device = call.tensors[0].device
                found = self._streamed.copied(tree, weights, device, unread, self.epoch)
                if isinstance(found, str):
                    return self._run_unserved(found, args, kwargs)
                prepared = prepared._replace(weights=(weights := found))
            arguments = [*self.weights.for_graph(weights, kind.quantization), *call.tensors]
        except Exception as exc:  # the graph is not to blame
            return self._run_after(exc, args, kwargs)
        try:
            outputs = run_graph(graph, arguments)
        except Exception as exc:
            if is_observed():
                raise  # the recording failed, which is no fault of the graph
            if not is_out_of_memory(exc):
                self._fail(kind, exc)
                return self.eager(*args, **kwargs)
            if kind.state is KindState.READY:
                raise OutOfMemoryError(str(exc)) from None  # one class for all libraries
        if outputs is None or kind.state is not KindState.READY:
            return self._run_eager_and_judge(prepared, call, outputs, args, kwargs)
        self.eager_reason = None
        try:
            served = self.family.output_of(self.block, outputs)
        except Exception as exc:
            return self._run_after(exc, args, kwargs)
        chosen = self._must_compare or self._registry.spot_checks.chosen is self
        if not chosen or is_observed():
            return served
        self._must_compare = False
        return self._spot_check(prepared, call, outputs, args, kwargs)

    def _run_eager_and_judge(
        self,
        prepared: _Prepared,
        call: BlockCall,
        outputs: Tensors | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return eager's result, and judge the graph's first outputs by it.

        There are none if it ran out of memory.
        """
        kind, _, weights, _ = prepared
        call = self._check.with_own_inputs(call)
        eager = self.eager(*args, **kwargs)
        self.compared += 1
        if outputs is None or not self._check.judge(kind, outputs, eager, call, weights, self.tree):
            self._registry.fell_back(kind.label, NOT_COMPARED)
            self.eager_reason = NOT_COMPARED
        else:
            self.eager_reason = None if kind.state is KindState.READY else kind.reason or UNDECIDED
        return eager

    def _spot_check(
        self,
        prepared: _Prepared,
        call: BlockCall,
        outputs: Tensors,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the graph's result, or eager's where the two differ now."""
        kind, _, weights, _ = prepared
        with self._registry.spot_checks.comparing():
            call = self._check.with_own_inputs(call)
            try:
                eager = self.eager(*args, **kwargs)
                judged = self._check.judge(kind, outputs, eager, call, weights, self.tree)
            except OutOfMemoryError:
                judged = False
        if judged and kind.state is KindState.FAILED:
            self._registry.found_wrong(kind.label, kind.reason, kind.key)
            self.eager_reason = kind.reason
            return eager
        return self.family.output_of(self.block, outputs)

    def _fail(self, kind: BlockKind, exc: Exception) -> None:
        """Run the kind eager after its graph raised an error."""
        kind.fail(f"failed while running: {str(exc).splitlines()[0] if str(exc) else exc!r}")
        logger.warning("%s runs eager: %s", kind.label, kind.reason)
        if not isinstance(exc, MachineError):
            self._registry.rejected(kind)
        self.eager_reason = kind.reason

    def _note_missing(self, kind: BlockKind) -> None:
        """Note a call of a kind without a graph."""
        if kind.state is KindState.FAILED:
            self._registry.fell_back(kind.label, kind.reason)
            self.eager_reason = kind.reason
            return
        self._missing_in = self._registry.epoch, self.attention is None
        self.eager_reason = NO_GRAPH_YET
        kind.met(self._registry.epoch)

    def _is_still_missing(self) -> bool:
        """Whether the call can run eager unexamined.

        The last call of the same image had no graph, and its kind has none now. A graph for another
        way of calling the block waits for the next image. Examining the block takes as long as one
        or two kernel launches, for each block of each step.
        """
        kind, moment = self.used, (self._registry.epoch, self.attention is None)
        if kind is None or kind.state is not KindState.MISSING or self._missing_in != moment:
            return False
        kind.calls += 1
        return True

    def _prepare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> _Prepared | Refusal:
        """Find the kind of a call, or say why no graph can serve it."""
        call = self.family.bind(self.block, args, kwargs)
        if self.attention is not None and isinstance(call, BlockCall):
            call = self.attention.graph_call(self.family, call)
        if isinstance(call, Refusal):
            return call
        if torch.is_grad_enabled():
            return Refusal("gradients are enabled")
        if self.replaced is not None and not (self._left is not None and self._left.passes()):
            return Refusal("it has a hook or a replaced forward of another extension")
        if self._own.is_outdated:
            return Refusal("another extension keeps the method that its class had before")
        tree, moment = self.tree, self._registry.moment
        if moment is None:
            self._registry.called_alone()
        if tree is None or tree.refusal_reason is None:
            if self._surroundings is not None and self._surroundings.may_replace_code(moment):
                self._registry.code.doubt()
            self._registry.code.settle()
        if tree is None or not tree.holds(moment, self.epoch):
            tree = self._read_block()
        if tree.is_training:
            return Refusal("the model is in training mode")
        if refusal := tree_refusal(tree):
            return refusal
        weights = self.weights.read(tree)
        if weights is None:
            tree = self._read_block()
            weights = None if tree.refusal_reason else self.weights.read(tree)
            if weights is None:
                return tree_refusal(tree) or Refusal("weights change while they are read")
        inputs = [normalise(t) for t in call.tensors]
        reason = boundary_reason(inputs, call)
        if reason is not None:
            return Refusal(reason)
        is_copied = self._streamed.are_needed(tree, weights, inputs[0].device)
        if is_copied and (refusal := self._streamed.refusal(tree, weights, inputs[0], self.epoch)):
            return refusal
        if inputs[0].is_cuda and self.family.widest(self.block, call) > _INDEX_LIMIT:
            return Refusal("more elements than a 32-bit index reaches")
        call = replace(call, tensors=tuple(inputs))
        autocast = autocast_state(inputs[0].device.type)
        # The tree is part of it: another thread may have read other modules since.
        # 8-bit copies on the GPU would take the memory that streaming saves.
        precision = "exact" if is_copied else precision_of(self._registry.precision, call)
        known_as = (tree, signature(call), autocast, precision)
        kind = self._found.get(known_as)
        if kind is None:
            # 8-bit copies are those of the calls with cross-attention.
            is_whole = call.prompt is None and self.attention is None
            ahead = () if is_whole else self.family.prompt_layers
            kind = self._found[known_as] = find_kind(
                self._registry, self.family, self.block, tree, weights,
                self.text_kv.graph_call(call, weights), autocast, ahead, precision,
            )  # fmt: skip
        return _Prepared(kind, call, weights, tree if is_copied else None)

    def _read_block(self) -> BlockTree:
        """Read the block's modules again."""
        registry = self._registry
        tree = BlockTree.of(
            self.block, self.family, registry.rules, registry.code, registry.moment, self.epoch
        )
        self._found.clear()
        self._must_compare = tree.has_left_wrappers
        self.weights.use(tree)
        self.text_kv.use(tree)
        return tree


def epoch_of(runners: Sequence[BlockRunner]) -> int | None:
    """Return the epoch of a model's runners; None for a model without any.

    Args:
        runners: Of the model's blocks. All belong to one `KindRegistry`.
    """
    return runners[0].epoch if runners else None
