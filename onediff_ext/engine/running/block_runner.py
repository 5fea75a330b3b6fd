"""What stands in the place of a block's forward: the kind's graph, or eager with a reason."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from onediff_ext.core.errors import MachineError, WeightsChangedError
from onediff_ext.core.kind_key import KindKey
from onediff_ext.engine.blocks.block_kind import BlockKind, KindState, LiveBlocks
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.family import BlockCall, BlockFamily, Refusal
from onediff_ext.engine.blocks.kind_registry import KindRegistry
from onediff_ext.engine.blocks.weight_slots import WeightSlot
from onediff_ext.engine.checking.compare_with_eager import QUANTIZED_TOLERANCE, as_exact_as, compare
from onediff_ext.engine.export.exporter import (
    Autocast,
    BlockFunction,
)
from onediff_ext.engine.graph_calls import is_observed, run_graph
from onediff_ext.engine.out_of_memory import is_out_of_memory
from onediff_ext.engine.quantization import (
    PRECISIONS,
    Quantization,
    QuantizedWeights,
    plan,
    unavailable_reason,
)
from onediff_ext.engine.running.block_identity import BlockIdentity, look_at, prepare_export
from onediff_ext.engine.running.call_signature import (
    autocast_state,
    boundary_problem,
    input_text,
    normalise,
    signature,
    work,
)
from onediff_ext.engine.running.text_kv import TextKv, stamp_of
from onediff_ext.engine.torch_versions import OutOfMemoryError

logger = logging.getLogger(__name__)

# Why a call ran eager although nothing is wrong with its kind.
NO_GRAPH_YET = "there is no graph yet"
NOT_COMPARED = "no memory yet to compare its graph with eager"
UNDECIDED = "its graph could not be compared: eager gave NaN"

_INDEX_LIMIT = 2**31 - 1
# A relative error below this may be eager's own; above, something is plainly wrong.
_DOUBTFUL = 1e-2


class BlockRunner:
    """Runs one block of a host's model.

    It is put into the block's instance attribute ``forward`` (or the method that the
    family names), so that hooks on the block itself go on working.

    Attributes:
        active: False lets every call through.
        used: The kind of the last call, or None when it ran eager for a reason of its own.
        eager_reason: Why the last call ran eager; None if it ran its graph, "" before the first.
        compared: Calls that gave eager's result although a graph ran, to compare the two.
        tree: What the block consisted of then.
        projections: What the last call with a graph had computed from its prompt.
    """

    capturable = True  # runs the same kernels at every call that looks the same

    def __init__(
        self,
        block: nn.Module,
        family: BlockFamily,
        forward: Callable[..., Any],
        kinds: KindRegistry,
    ) -> None:
        self.block, self.family, self._kinds = block, family, kinds
        own = getattr(type(block), family.method)
        self._forward = None if getattr(forward, "__func__", None) is own else forward
        self.active = True
        self.compared = 0
        self.used: BlockKind | None = None
        self.eager_reason: str | None = ""
        self.tree: BlockTree | None = None
        self._found: dict[tuple[Any, ...], BlockKind] = {}
        self._missing_in: int | None = None  # the epoch in which the last call had no graph
        self._quantized: QuantizedWeights | None = None
        self._prompt_weights: tuple[int, ...] = ()  # indices of what the prompt's layers read
        self._wrapped_slots: list[WeightSlot] = []
        self.projections: TextKv | None = None

    @property
    def eager(self) -> Callable[..., Any]:
        """What runs in place of a graph: what the block had as an instance, or else what its class
        has now, which somebody may have changed since."""
        if self._forward is not None:
            return self._forward
        return MethodType(getattr(type(self.block), self.family.method), self.block)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        # A copied model has weights of its own: its blocks run their own forward, eager.
        return copy.deepcopy(self.eager, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self.eager(*args, **kwargs)
        if self._is_still_missing():
            return self.eager(*args, **kwargs)
        try:
            prepared = self._prepare(args, kwargs)
        except OutOfMemoryError:
            raise
        except Exception as exc:  # what others have put there must not end a picture
            if is_observed():
                raise
            logger.warning("%s runs eager", self.family.label, exc_info=True)
            prepared = Refusal(f"it cannot be looked at: {type(exc).__name__}: {exc}")
        if isinstance(prepared, Refusal):
            self.used, self.eager_reason = None, prepared.reason
            self._kinds.fell_back(self.family.label, prepared.reason)
            return self.eager(*args, **kwargs)
        kind, call, weights = prepared
        self.used = kind
        kind.calls += 1
        graph = kind.graph
        if graph is None:
            if kind.state is KindState.FAILED:
                self._kinds.fell_back(kind.label, kind.reason)
                self.eager_reason = kind.reason
            else:
                self._missing_in = self._kinds.epoch
                self.eager_reason = NO_GRAPH_YET
                kind.met(self._missing_in)
            return self.eager(*args, **kwargs)
        output: torch.Tensor | None = None
        # What raises here is the host's layers', or memory: no graph is to blame.
        call = self._ahead(call, weights)
        arguments = [*self._taken_by(kind, weights), *call.tensors]
        try:
            output = run_graph(graph, arguments)
        except Exception as exc:
            if is_observed():
                raise  # the recording failed, which is no fault of the graph
            if is_out_of_memory(exc):
                if kind.state is KindState.READY:
                    raise OutOfMemoryError(str(exc)) from None  # whatever class it had
            else:
                kind.fail(
                    f"failed while running: {str(exc).splitlines()[0] if str(exc) else exc!r}"
                )
                logger.warning("%s runs eager: %s", kind.label, kind.reason)
                if not isinstance(exc, MachineError):
                    self._kinds.rejected(kind)
                self.eager_reason = kind.reason
                return self.eager(*args, **kwargs)
        if output is not None and kind.state is KindState.READY:
            self.eager_reason = None
            if self._kinds.spot_checks.chosen is not self or is_observed():
                return self.family.output_of(self.block, output)
            return self._checked_again(kind, output, call, weights, args, kwargs)
        if self.family.mutates_inputs:
            call = replace(call, tensors=tuple(t.clone() for t in call.tensors))
        eager = self.eager(*args, **kwargs)
        self.compared += 1
        if not self._was_checked(kind, output, self.family.tensor_of(eager), call, weights):
            self._kinds.fell_back(kind.label, NOT_COMPARED)
            self.eager_reason = NOT_COMPARED
        else:
            self.eager_reason = None if kind.state is KindState.READY else kind.reason or UNDECIDED
        return eager

    def _checked_again(
        self,
        kind: BlockKind,
        output: torch.Tensor,
        call: BlockCall,
        weights: Sequence[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A graph's output, or eager's result where the two differ all of a sudden."""
        with self._kinds.spot_checks.comparing():
            if self.family.mutates_inputs:
                call = replace(call, tensors=tuple(t.clone() for t in call.tensors))
            try:
                eager = self.eager(*args, **kwargs)
                checked = self._was_checked(
                    kind, output, self.family.tensor_of(eager), call, weights
                )
            except OutOfMemoryError:
                checked = False
        if checked and kind.state is KindState.FAILED:
            self._kinds.found_wrong(kind.label, kind.reason, kind.key)
            self.eager_reason = kind.reason
            return eager
        return self.family.output_of(self.block, output)

    @property
    def epoch(self) -> int:
        """As `KindRegistry.epoch`."""
        return self._kinds.epoch

    def _is_still_missing(self) -> bool:
        """Whether nothing has to be looked at: there was no graph before in the same picture, and
        there is none now. (One for another way of calling the block is found with the next.) A
        look takes as long as a launch or two, for each block of each step."""
        kind = self.used
        if (
            kind is None
            or kind.state is not KindState.MISSING
            or self._missing_in != self._kinds.epoch
        ):
            return False
        kind.calls += 1
        return True

    def _ahead(self, call: BlockCall, weights: Sequence[torch.Tensor]) -> BlockCall:
        """A call as its graph takes it, with what depends on the prompt alone computed."""
        prompt = call.prompt
        if prompt is None:
            return call
        read = [weights[i] for i in self._prompt_weights]
        stamp = stamp_of(self._kinds.epoch, prompt, read)
        known = self.projections
        if known is None or not known.serve(prompt, stamp, read):
            made = self._project(prompt, weights)
            known = self.projections = TextKv(prompt, made, stamp, read)
        return self.family.projected(call, known.tensors)

    def project(self, prompt: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the block's graph takes in place of a prompt, with the weights as they are now."""
        return self._project(prompt, self.weights())

    def weights(self) -> list[torch.Tensor]:
        """The weights that the last call's graph read, as they are now.

        Raises:
            WeightsChangedError: They are no longer of the form that the graph reads.
        """
        weights = None if self.tree is None else self.tree.weights(self._generation())
        if weights is None:
            raise WeightsChangedError("A block has other weights than it had a moment ago.")
        return weights

    def prompt_weights(self) -> list[torch.Tensor]:
        """Those of `weights` that `project` reads."""
        weights = self.weights()
        return [weights[i] for i in self._prompt_weights]

    def _project(
        self, prompt: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        assert self.tree is not None
        merged = {
            self.tree.slots[i].path.removesuffix(".weight"): weights[i]
            for i in self._prompt_weights
            if self.tree.slots[i].is_wrapped
        }
        return self.family.project(self.block, prompt, merged)

    @property
    def derives(self) -> bool:
        """Whether its graph reads weights that were made from others: by a wrapper, in 8 bits."""
        return self._quantized is not None or bool(self._wrapped_slots)

    def derived_from_now(self) -> Hashable:
        """What those weights would be made from now."""
        generation = self._generation()
        return (
            tuple(slot.would_be_made_from(generation) for slot in self._wrapped_slots),
            None if self._quantized is None else self._quantized.would_be_made_from(generation),
        )

    def derived_from(self) -> Hashable:
        """What those weights were made from last."""
        return (
            tuple(slot.made_from for slot in self._wrapped_slots),
            None if self._quantized is None else self._quantized.made_from,
        )

    def derived_places(self) -> tuple[int, ...]:
        """Where they lie."""
        return tuple(slot.place() for slot in self._wrapped_slots)

    def _generation(self) -> int:
        return self._kinds.contents.look(self._kinds.epoch)

    def _taken_by(self, kind: BlockKind, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """The weights as a kind's graph takes them."""
        if kind.quantization is None:
            self._quantized = None
            return weights
        if self._quantized is None or self._quantized.quantization != kind.quantization:
            self._quantized = QuantizedWeights(kind.quantization)
        taken = self._quantized.apply(weights, self._generation())
        if self._quantized.was_made:
            assert self.tree is not None
            slots = zip(self.tree.slots, weights, strict=True)
            self._kinds.contents.watch(w for slot, w in slots if not slot.is_wrapped and w.ndim > 1)
        return taken

    def _was_checked(
        self,
        kind: BlockKind,
        output: torch.Tensor | None,
        eager: torch.Tensor,
        call: BlockCall,
        weights: Sequence[torch.Tensor],
    ) -> bool:
        """Judge a graph's first run, unless that takes more memory than there is: a comparison
        that can wait must not cost the picture."""
        if output is None:
            return False
        try:
            self._check(kind, output, eager, call, weights)
        except OutOfMemoryError:
            return False
        return True

    def _check(
        self,
        kind: BlockKind,
        output: torch.Tensor,
        eager: torch.Tensor,
        call: BlockCall,
        weights: Sequence[torch.Tensor],
    ) -> None:
        """Judge the first run of a graph in this process."""
        allowed = None if kind.quantization is None else QUANTIZED_TOLERANCE
        comparison = compare(output, eager, allowed)
        if comparison.problem is not None and comparison.error < _DOUBTFUL:
            comparison = as_exact_as(output, eager, self._exact(call, weights))
        kind.comparison = comparison
        if comparison.problem is not None:
            kind.fail(comparison.problem)
            logger.warning("%s runs eager: its graph %s", kind.label, comparison.problem)
            self._kinds.rejected(kind)
        elif comparison.decided:
            kind.state = KindState.READY

    def _exact(self, call: BlockCall, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the block computes, in float64."""
        assert self.tree is not None
        block = self.tree.copy()
        self.family.prepare(block)
        function = BlockFunction(block, self.family, self.tree.names, dict(call.statics), None)
        with torch.no_grad():
            output: torch.Tensor = function(
                [w.detach().double() for w in weights], *(t.double() for t in call.tensors)
            )
        return output

    def _prepare(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[BlockKind, BlockCall, list[torch.Tensor]] | Refusal:
        call = self.family.bind(self.block, args, kwargs)
        if isinstance(call, Refusal):
            return call
        if torch.is_grad_enabled():
            return Refusal("gradients are enabled")
        tree = self.tree
        if tree is None or not tree.holds(self._kinds.moment):
            tree = self._look()
        if tree.drops and self.block.training:
            return Refusal("the model is in training mode")
        if tree.refusal_reason is not None:
            return Refusal(tree.refusal_reason)
        generation = self._generation()
        weights = tree.weights(generation)
        if weights is None:
            tree = self._look()
            weights = None if tree.refusal_reason else tree.weights(generation)
            if weights is None:
                return Refusal(tree.refusal_reason or "weights change while they are read")
        inputs = [normalise(t) for t in call.tensors]
        problem = boundary_problem(inputs, call, weights)
        if problem is not None:
            return Refusal(problem)
        if inputs[0].is_cuda and self.family.widest(self.block, call) > _INDEX_LIMIT:
            return Refusal("more elements than a 32-bit index reaches")
        call = replace(call, tensors=tuple(inputs))
        autocast = autocast_state(inputs[0].device.type)
        # With the tree: another thread may have met other modules since.
        known_as = (tree, signature(call), autocast)
        kind = self._found.get(known_as)
        if kind is None:
            kind = self._identify(tree, call, weights, autocast)
            self._found[known_as] = kind
        return kind, call, weights

    def _look(self) -> BlockTree:
        self.tree = look_at(self.block, self.family, self._kinds.rules, self._kinds.code)
        self._found.clear()
        self._wrapped_slots = [slot for slot in self.tree.slots if slot.is_wrapped]
        for slot in self._wrapped_slots:
            slot.changed = self._kinds.contents.watch
        layers = tuple(f"{name}." for name in self.family.prompt_layers)
        self._prompt_weights = tuple(
            i for i, name in enumerate(self.tree.names) if layers and name.startswith(layers)
        )
        return self.tree

    def _identify(
        self,
        tree: BlockTree,
        call: BlockCall,
        weights: Sequence[torch.Tensor],
        autocast: Autocast,
    ) -> BlockKind:
        without = () if call.prompt is None else self.family.prompt_layers
        call = self._ahead(call, weights)
        device = call.tensors[0].device
        entries = {
            **tree.entries,
            **self.family.packages(),
            **self._kinds.key_entries(device),
            "inputs": "; ".join(
                input_text(t, dims) for t, dims in zip(call.tensors, call.dims, strict=True)
            ),
            "call": repr(call.statics),
            "autocast": "off" if autocast is None else str(autocast[1]),
        }
        quantization = None
        if self.family.quantisable and self._kinds.precision in PRECISIONS:
            quantization = self._quantise(tree, weights, device, without)
        if quantization is not None:
            entries["precision"] = repr(quantization)
        key, family = KindKey(entries), self.family
        rules, code = self._kinds.rules, self._kinds.code
        # What is kept of the block: no weight, since the kind outlives it.
        identity, blocks = BlockIdentity.of(tree), LiveBlocks()
        # Only shapes, dtypes and layouts of the example matter: keep none of its memory.
        outline = BlockCall(
            tuple(torch.empty_like(t, device="meta") for t in call.tensors),
            call.dims,
            call.statics,
        )

        def prepare(on: torch.device) -> Callable[[], bytes]:
            return prepare_export(
                blocks, identity, family, rules, code, outline, autocast, quantization, on
            )

        label, cost = family.describe(self.block), work(call, weights)
        if quantization is not None:
            label = f"{label} {quantization.precision}"
        kind = self._kinds.find(
            key,
            device,
            lambda: BlockKind(key, label, device, prepare, quantization, cost, blocks=blocks),
        )
        kind.blocks.add(self.block)
        return kind

    def _quantise(
        self,
        tree: BlockTree,
        weights: Sequence[torch.Tensor],
        device: torch.device,
        without: Sequence[str],
    ) -> Quantization | None:
        precision = self._kinds.precision
        reason = unavailable_reason(precision, device)
        if reason is not None:
            self._kinds.fell_back(f"the {precision} precision", reason)
            return None
        return plan(tree.names, weights, precision, without)
