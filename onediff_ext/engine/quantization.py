"""Linear layers in 8 bits: which weights of a block are quantized, and their 8-bit copies.

fp8 (e4m3) is a floating type, so the scale hardly matters as long as nothing overflows. A weight
has one scale. A LayerNorm's output has one scale too, from a bound that its weights prove. Other
inputs get one scale for each token, computed when the graph runs. Products with single scales are
the fast ones.

int8 needs a scale for each output channel and for each token.

Only the linear layers inside transformer blocks are quantized, as the block's family says.
Convolutions, time embeddings and layers between blocks keep the host's precision.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from onediff_ext.core.errors import ModelChangedError
from onediff_ext.engine.graph_calls import is_observed
from onediff_ext.engine.validity.tensor_contents import content_of
from onediff_ext.engine.weak_tensors import WeakTensors

# The 8-bit dtype of each precision, and the largest magnitude that is used.
EIGHT_BIT_TYPES = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
PRECISIONS = tuple(EIGHT_BIT_TYPES)
SMALLEST_SCALE = 1e-12
FEWEST_ROWS = {"fp8": 1, "int8": 17}  # of an input, for the libraries' products on a GPU
_MULTIPLE = 16  # the libraries' 8-bit products need both dims to be multiples of it


@dataclass(frozen=True)
class EightBitLinears:
    """Which linear layers of a family's blocks may compute in 8 bits.

    Args:
        together: Names of layers that read one input; they become one product.
        exact: Layers that keep the host's precision, by the ends of their names.
    """

    together: tuple[tuple[str, ...], ...] = ()
    exact: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quantization:
    """Which weights of a block are 8-bit copies in its graph.

    Args:
        precision: ``"fp8"`` or ``"int8"``.
        groups: Indices of weights. The weights of one group are stacked into one.
    """

    precision: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def key_entry(self) -> str:
        """Its text in a kind's key. Stored graphs have the spelling of the first releases."""
        return f"Quantisation(precision={self.precision!r}, groups={self.groups!r})"


def unavailable_reason(precision: str, device: torch.device) -> str | None:
    """Say why linear layers cannot run in this precision on a device, or None.

    Args:
        precision: One of `PRECISIONS`.
        device: Where the block runs.

    Returns:
        One line for people. fp8 needs compute capability 8.9, int8 needs 7.5.
    """
    if device.type != "cuda":
        return f"{precision} is for GPUs"
    capability = torch.cuda.get_device_capability(device)
    needed = (8, 9) if precision == "fp8" else (7, 5)
    if capability < needed:
        have = ".".join(map(str, capability))
        return f"{precision} needs compute capability {needed[0]}.{needed[1]}, this GPU has {have}"
    return None


def plan(
    names: Sequence[str],
    weights: Sequence[torch.Tensor],
    precision: str,
    linears: EightBitLinears,
    without: Sequence[str] = (),
) -> Quantization | None:
    """Choose the weights of a block that become 8-bit copies.

    Args:
        names, weights: The weights of the block.
        precision: One of `PRECISIONS`.
        linears: Of the block's family.
        without: Names of layers that the graph does not run.

    Returns:
        The plan, or None when no weight qualifies.
    """
    index = {
        layer: i
        for i, (name, weight) in enumerate(zip(names, weights, strict=True))
        if (layer := name.removesuffix(".weight")) != name
        and layer not in without
        and not layer.endswith(linears.exact)
        and _fits(weight)
    }
    groups = []
    for together in linears.together:
        members = tuple(index[name] for name in together if name in index)
        if len(members) == len(together) and len({weights[i].shape[1] for i in members}) == 1:
            groups.append(members)
    taken = {i for group in groups for i in group}
    groups += [(i,) for i in index.values() if i not in taken]
    return Quantization(precision, tuple(sorted(groups))) if groups else None


def _fits(weight: torch.Tensor) -> bool:
    return (
        weight.ndim == 2
        and weight.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and weight.is_contiguous()
        and all(n % _MULTIPLE == 0 for n in weight.shape)
    )


class QuantizedWeights:
    """The 8-bit copies for one block.

    They stay at one address and are written again in place when the weights change, since CUDA
    graphs read them.

    Args:
        quantization: Which weights are copied.

    Attributes:
        made_from: Identifies the weights that the copies were made from; None before.
        was_made: Whether the last `apply` wrote the copies.
    """

    def __init__(self, quantization: Quantization) -> None:
        self.quantization = quantization
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._unit: list[torch.Tensor] = []
        self._sources = WeakTensors([])
        self._exchanges = 0  # how often the sources were others: at the same addresses, perhaps
        self.made_from: Hashable = None
        self.was_made = False

    @property
    def size_bytes(self) -> int:
        """Memory of the copies."""
        return sum(t.numel() * t.element_size() for copies in self._copies for t in copies)

    @property
    def device(self) -> torch.device | None:
        """Where the copies lie; None before they are made."""
        return self._copies[0][0].device if self._copies else None

    def release(self) -> None:
        """Free the copies; the next `apply` makes them again."""
        self._copies, self._unit, self.made_from = [], [], None

    @property
    def sources(self) -> WeakTensors:
        """The weights that the last `apply` copied; another object after each `apply`."""
        return self._sources

    def would_be_made_from(self, generation: int) -> Hashable:
        """Return what `made_from` would be if the copies were made now from the same weights.

        Args:
            generation: From `TensorContents.current_generation`.
        """
        sources = self._sources.alive()
        if sources is None:
            return None
        return (generation, self._exchanges, *map(content_of, sources))

    def apply(self, weights: Sequence[torch.Tensor], generation: int) -> list[torch.Tensor]:
        """Return a block's weights as its quantized graph takes them.

        Args:
            weights: The weights of the block, in the order of the plan.
            generation: From `TensorContents.current_generation`.

        Returns:
            The weights with a stacked copy in place of the first of each group, the scales of all
            groups, and with fp8 the scale [1] of inputs of at most 1.

        Raises:
            ModelChangedError: A CUDA graph is being recorded, and the copies have to be written.
        """
        sources = [[weights[i] for i in group] for group in self.quantization.groups]
        read = [weight for group in sources for weight in group]
        last = self._sources.alive()
        if last is None or len(last) != len(read) or not all(map(operator.is_, last, read)):
            self._exchanges += 1
        self._sources = WeakTensors(read)
        now = self.would_be_made_from(generation)
        self.was_made = now != self.made_from
        if self.was_made:
            if is_observed():
                raise ModelChangedError("A weight has changed since the forward before it.")
            self.made_from = None  # stays None when the copies fail halfway
            self._make(sources)
            self.made_from = now
        taken = list(weights)
        for group, (copy, _) in zip(self.quantization.groups, self._copies, strict=True):
            taken[group[0]] = copy
        return [*taken, *(scale for _, scale in self._copies), *self._unit]

    def _make(self, sources: Sequence[Sequence[torch.Tensor]]) -> None:
        precision = self.quantization.precision
        device = sources[0][0].device
        if not self._copies or self._copies[0][0].device != device:
            self._copies = [_allocate(group, precision) for group in sources]
            self._unit = _unit(precision, device)
        fill = _fill_fp8 if precision == "fp8" else _fill_int8
        for group, (rows, scales) in zip(sources, self._copies, strict=True):
            fill([weight.detach() for weight in group], rows, scales)


def outlines(weights: Sequence[torch.Tensor], quantization: Quantization) -> list[torch.Tensor]:
    """Return tensors without memory, with the forms of `QuantizedWeights.apply`'s result.

    Args:
        weights: The weights of the block, or tensors of their form.
        quantization: Which of them are 8-bit copies.
    """
    taken, scales = list(weights), []
    for group in quantization.groups:
        taken[group[0]], scale = _allocate([weights[i] for i in group], quantization.precision)
        taken[group[0]].untyped_storage().resize_(0)
        scale.untyped_storage().resize_(0)
        scales.append(scale)
    return [*taken, *scales, *_unit(quantization.precision, weights[0].device)]


def _allocate(group: Sequence[torch.Tensor], precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the copy of stacked weights [N, K] and its scales.

    Returns:
        A matrix [sum of N, K] in 8 bits; float32 scales, [1] for fp8 and [1, sum of N] for int8.
    """
    dtype, _ = EIGHT_BIT_TYPES[precision]
    rows, columns, device = sum(w.shape[0] for w in group), group[0].shape[1], group[0].device
    form = (1,) if precision == "fp8" else (1, rows)
    with torch.inference_mode(False):
        return (
            torch.empty(rows, columns, dtype=dtype, device=device),
            torch.empty(form, dtype=torch.float32, device=device),
        )


def _unit(precision: str, device: torch.device) -> list[torch.Tensor]:
    """Return the scale [1] of numbers of at most 1, for the precision that needs it."""
    if precision != "fp8":
        return []
    with torch.inference_mode(False):
        return [torch.full((1,), 1 / EIGHT_BIT_TYPES[precision][1], device=device)]


# The two functions below use few operations, since they run for each weight of a model.


def _fill_fp8(group: Sequence[torch.Tensor], rows: torch.Tensor, scale: torch.Tensor) -> None:
    largest = [torch.linalg.vector_norm(w, torch.inf, dtype=torch.float32) for w in group]
    torch.mul(torch.stack(largest).amax(), 1 / EIGHT_BIT_TYPES["fp8"][1], out=scale[0])
    inverse = scale.clamp_min_(SMALLEST_SCALE).reciprocal()
    sizes = [weight.shape[0] for weight in group]
    for weight, part in zip(group, torch.split(rows, sizes), strict=True):
        part.copy_(weight * inverse)


def _fill_int8(group: Sequence[torch.Tensor], rows: torch.Tensor, scales: torch.Tensor) -> None:
    sizes = [weight.shape[0] for weight in group]
    parts = zip(group, torch.split(rows, sizes), torch.split(scales[0], sizes), strict=True)
    for weight, part, scale in parts:
        largest = torch.linalg.vector_norm(weight, torch.inf, dim=-1, dtype=torch.float32)
        torch.mul(largest, 1 / EIGHT_BIT_TYPES["int8"][1], out=scale)
        inverse = scale.clamp_min_(SMALLEST_SCALE).reciprocal()
        part.copy_((weight * inverse.unsqueeze(-1)).round_())
