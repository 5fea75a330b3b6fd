"""What stands in the place of a block's forward: the kind's graph, or eager with a reason."""

from __future__ import annotations

import copy
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from onediff_ext.core.errors import BlockGoneError, MachineError
from onediff_ext.core.keys import KindKey
from onediff_ext.engine.check import QUANTISED_TOLERANCE, as_exact_as, compare
from onediff_ext.engine.families.base import BlockCall, BlockFamily, Refusal
from onediff_ext.engine.kinds import Kind, KindState
from onediff_ext.engine.out_of_memory import is_out_of_memory
from onediff_ext.engine.prompt import Projections, stamp_of
from onediff_ext.engine.quantised import (
    PRECISIONS,
    Quantisation,
    QuantisedWeights,
    outlines,
    plan,
    unavailable_reason,
)
from onediff_ext.engine.structure import BlockTree, WrapperRule
from onediff_ext.engine.torch_versions import OutOfMemoryError, autocast_dtype
from onediff_ext.engine.trace import (
    Autocast,
    BlockFunction,
    export_block,
    is_channels_last,
    make_examples,
    outline_of,
    save_program,
)

logger = logging.getLogger(__name__)

_INDEX_LIMIT = 2**31 - 1
# A relative error below this may be eager's own; above, something is plainly wrong.
_DOUBTFUL = 1e-2


class Kinds(ABC):
    """Who knows the kinds of this process; the session implements it."""

    rules: Sequence[WrapperRule]
    precision = "exact"  # of the linear layers, as in `CompileOptions`

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Differs after any moment in which weights may have changed without a trace."""

    @abstractmethod
    def key_entries(self, device: torch.device) -> dict[str, str]:
        """The parts of a key that machine and backend give."""

    @abstractmethod
    def find(self, key: KindKey, make: Callable[[], Kind]) -> Kind:
        """The kind of this key, made (and its graph loaded, if stored) when it is new."""

    def rejected(self, kind: Kind) -> None:  # noqa: B027
        """Hear that a kind's graph was wrong in this process."""

    @abstractmethod
    def fell_back(self, what: str, reason: str) -> None:
        """Count one call that ran eager although a graph was wanted."""


class BlockRunner:
    """Runs one block of a host's model.

    It is put into the block's instance attribute ``forward`` (or the method that the
    family names), so that hooks on the block itself go on working.

    Attributes:
        active: False lets every call through.
        used: The kind of the last call, or None when it ran eager for a reason of its own.
        compared: Calls that gave eager's result although a graph ran, to compare the two.
        tree: What the block consisted of then.
        projections: What the last call with a graph had computed from its prompt.
    """

    capturable = True  # runs the same kernels at every call that looks the same

    def __init__(
        self, block: nn.Module, family: BlockFamily, forward: Callable[..., Any], kinds: Kinds
    ) -> None:
        self.block, self.family, self._kinds = block, family, kinds
        own = getattr(type(block), family.method)
        self._forward = None if getattr(forward, "__func__", None) is own else forward
        self.active = True
        self.compared = 0
        self.used: Kind | None = None
        self.tree: BlockTree | None = None
        self._found: dict[tuple[Any, ...], Kind] = {}
        self._missing_in: int | None = None  # the epoch in which the last call had no graph
        self._quantised: QuantisedWeights | None = None
        self._prompt_weights: tuple[int, ...] = ()  # indices of what the prompt's layers read
        self.projections: Projections | None = None

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
        prepared = self._prepare(args, kwargs)
        if isinstance(prepared, Refusal):
            self.used = None
            self._kinds.fell_back(self.family.label, prepared.reason)
            return self.eager(*args, **kwargs)
        kind, call, weights = prepared
        self.used = kind
        kind.calls += 1
        graph = kind.graph
        if graph is None:
            if kind.state is KindState.FAILED:
                self._kinds.fell_back(kind.label, kind.reason)
            else:
                self._missing_in = self._kinds.epoch
            return self.eager(*args, **kwargs)
        output: torch.Tensor | None = None
        try:
            call = self._ahead(call, weights)
            output = graph([*self._taken_by(kind, weights), *call.tensors])
        except Exception as exc:
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
                return self.eager(*args, **kwargs)
        if output is not None and kind.state is KindState.READY:
            return self.family.output_of(self.block, output)
        if self.family.mutates_inputs:
            call = replace(call, tensors=tuple(t.clone() for t in call.tensors))
        eager = self.eager(*args, **kwargs)
        self.compared += 1
        if not self._was_checked(kind, output, self.family.tensor_of(eager), call, weights):
            self._kinds.fell_back(kind.label, "no memory yet to compare its graph with eager")
        return eager

    @property
    def epoch(self) -> int:
        """As `Kinds.epoch`."""
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
            made = self.family.project(self.block, prompt)
            known = self.projections = Projections(prompt, made, stamp, read)
        return self.family.projected(call, known.tensors)

    def refresh(self) -> None:
        """Make 8-bit copies anew whose weights may have changed: before a CUDA graph is replayed
        that points to them."""
        if self._quantised is not None:
            self._quantised.refresh(self._kinds.epoch)

    def _taken_by(self, kind: Kind, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """The weights as a kind's graph takes them."""
        if kind.quantisation is None:
            return weights
        if self._quantised is None or self._quantised.quantisation != kind.quantisation:
            self._quantised = QuantisedWeights(kind.quantisation)
        return self._quantised.apply(weights, self._kinds.epoch)

    def _was_checked(
        self,
        kind: Kind,
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
        kind: Kind,
        output: torch.Tensor,
        eager: torch.Tensor,
        call: BlockCall,
        weights: Sequence[torch.Tensor],
    ) -> None:
        """Judge the first run of a graph in this process."""
        allowed = None if kind.quantisation is None else QUANTISED_TOLERANCE
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
    ) -> tuple[Kind, BlockCall, list[torch.Tensor]] | Refusal:
        call = self.family.bind(self.block, args, kwargs)
        if isinstance(call, Refusal):
            return call
        if torch.is_grad_enabled():
            return Refusal("gradients are enabled")
        tree = self.tree
        if tree is None or not tree.holds():
            tree = self._look()
        if tree.drops and self.block.training:
            return Refusal("the model is in training mode")
        if tree.refusal is not None:
            return Refusal(tree.refusal)
        weights = tree.weights()
        if weights is None:
            tree = self._look()
            weights = None if tree.refusal else tree.weights()
            if weights is None:
                return Refusal(tree.refusal or "weights change while they are read")
        inputs = [_normalise(t) for t in call.tensors]
        problem = _boundary_problem(inputs, call, weights)
        if problem is not None:
            return Refusal(problem)
        if inputs[0].is_cuda and self.family.widest(self.block, call) > _INDEX_LIMIT:
            return Refusal("more elements than a 32-bit index reaches")
        call = replace(call, tensors=tuple(inputs))
        autocast = _autocast_state(inputs[0].device.type)
        signature = (_signature(call), autocast)
        kind = self._found.get(signature)
        if kind is None:
            kind = self._identify(tree, call, weights, autocast)
            self._found[signature] = kind
        return kind, call, weights

    def _look(self) -> BlockTree:
        self.tree = look_at(self.block, self.family, self._kinds.rules)
        self._found.clear()
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
    ) -> Kind:
        without = () if call.prompt is None else self.family.prompt_layers
        call = self._ahead(call, weights)
        device = call.tensors[0].device
        entries = {
            **tree.entries,
            **self.family.packages(),
            **self._kinds.key_entries(device),
            "inputs": "; ".join(
                _input_text(t, dims) for t, dims in zip(call.tensors, call.dims, strict=True)
            ),
            "call": repr(call.statics),
            "autocast": "off" if autocast is None else str(autocast[1]),
        }
        quantisation = None
        if self.family.quantisable and self._kinds.precision in PRECISIONS:
            quantisation = self._quantise(tree, weights, device, without)
        if quantisation is not None:
            entries["precision"] = repr(quantisation)
        key, block, family = KindKey(entries), weakref.ref(self.block), self.family
        rules = self._kinds.rules
        # Only shapes, dtypes and layouts of the example matter: keep none of its memory.
        outline = BlockCall(
            tuple(torch.empty_like(t, device="meta") for t in call.tensors),
            call.dims,
            call.statics,
        )

        def prepare_export(on: torch.device) -> Callable[[], bytes]:
            return _prepare_export(
                block(), tree, family, rules, outline, autocast, quantisation, on
            )

        label, work = family.describe(self.block), _work(call, weights)
        if quantisation is not None:
            label = f"{label} {quantisation.precision}"
        kind = self._kinds.find(
            key, lambda: Kind(key, label, device, prepare_export, quantisation, work)
        )
        kind.blocks.add(self.block)
        return kind

    def _quantise(
        self,
        tree: BlockTree,
        weights: Sequence[torch.Tensor],
        device: torch.device,
        without: Sequence[str],
    ) -> Quantisation | None:
        precision = self._kinds.precision
        reason = unavailable_reason(precision, device)
        if reason is not None:
            self._kinds.fell_back(f"the {precision} precision", reason)
            return None
        return plan(tree.names, weights, precision, without)


def look_at(block: nn.Module, family: BlockFamily, rules: Sequence[WrapperRule]) -> BlockTree:
    """What a block consists of now, as its family sees it."""
    return BlockTree(
        block,
        family.sources,
        rules,
        family.parts,
        family.transient,
        family.interfering,
        family.patchers,
    )


def _prepare_export(
    block: nn.Module | None,
    identified: BlockTree,
    family: BlockFamily,
    rules: Sequence[WrapperRule],
    outline: BlockCall,
    autocast: Autocast,
    quantisation: Quantisation | None,
    device: torch.device,
) -> Callable[[], bytes]:
    if block is None:
        raise BlockGoneError("The model is gone.")
    tree = look_at(block, family, rules)
    if tree.refusal is not None or not tree.is_built_as(identified):
        raise BlockGoneError("The block has changed since its kind was named.")
    traced = tree.copy()
    family.prepare(traced)
    examples = make_examples(outline, device)
    # Those that the kind was named with: SDXL's VAE is float32 for its calls only.
    weights = [outline_of(layout, device) for layout in identified.layouts()]
    if quantisation is not None:
        weights = outlines(weights, quantisation)

    def export() -> bytes:
        program = export_block(
            traced, family, tree.names, weights, outline, device, autocast, examples, quantisation
        )
        return save_program(program)

    return export


def _work(call: BlockCall, weights: Sequence[torch.Tensor]) -> float:
    """About how many multiplications a call costs: each weight at each place of the image."""
    image = call.tensors[0]
    places = image.numel() / (image.shape[1] if image.ndim == 4 else image.shape[-1])
    return places * sum(weight.numel() for weight in weights)


def _normalise(tensor: torch.Tensor) -> torch.Tensor:
    """The one layout that graphs are built for: NHWC images, everything else contiguous."""
    if tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


def _boundary_problem(
    inputs: Sequence[torch.Tensor], call: BlockCall, weights: Sequence[torch.Tensor]
) -> str | None:
    """What a stored graph would not notice by itself, since it checks none of its inputs."""
    device = inputs[0].device
    sizes: dict[str, int] = {}
    for tensor, dims in zip(inputs, call.dims, strict=True):
        if tensor.ndim != len(dims):
            return f"an input has {tensor.ndim} dims where {len(dims)} are expected"
        if tensor.device != device:
            return "inputs on different devices"
        for size, name in zip(tensor.shape, dims, strict=True):
            if name is None:
                continue
            if size == 0:
                return f"an empty {name}"
            if sizes.setdefault(name, size) != size:
                return f"{name} differs between inputs"
    if any(weight.device != device for weight in weights):
        return "weights are on another device (offloading)"
    if sizes["batch"] > 63:
        return "more than 63 images at once"
    return None


def _signature(call: BlockCall) -> tuple[Any, ...]:
    fixed = tuple(
        (t.dtype, t.device, *(n for n, name in zip(t.shape, dims, strict=True) if name is None))
        for t, dims in zip(call.tensors, call.dims, strict=True)
    )
    return (fixed, call.statics, call.prompt is None)


def _autocast_state(device_type: str) -> Autocast:
    dtype = autocast_dtype(device_type)
    return None if dtype is None else (device_type, dtype)


def _input_text(tensor: torch.Tensor, dims: Sequence[str | None]) -> str:
    shape = ",".join(name or str(n) for n, name in zip(tensor.shape, dims, strict=True))
    layout = " nhwc" if is_channels_last(tensor) else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} [{shape}]{layout}"
