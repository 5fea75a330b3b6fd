"""Linear layers in 8 bits: copies of the weights, and the arithmetic that a graph is traced with.

fp8 (e4m3) is a floating type: where the scale lies hardly matters, as long as nothing runs over.
So a weight has one scale, and what a LayerNorm gives has one that its weights prove to be enough;
one for each token is found, when the graph runs, only for what has no bound. Products with one
scale are the fast ones. Whole numbers need a scale for each output channel and for each token.

Only the linear layers inside transformer blocks are taken: convolutions, time embeddings and the
layers between blocks stay as the host has them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onediff_ext.core.errors import WeightsChangedError
from onediff_ext.engine.graph_calls import is_observed
from onediff_ext.engine.validity.tensor_contents import content_of

# The 8-bit type of each precision, and its largest value that is used.
_TYPES = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
_SMALLEST_SCALE = 1e-12
_MULTIPLE = 16  # what the libraries' 8-bit products ask of both dims
# What attention gives would have to be written in 8 bits by a pass of its own, which takes longer
# than these products save.
_KEPT = ("to_out.0",)
# Names of layers that read one input, and are one product.
_TOGETHER = (("attn1.to_q", "attn1.to_k", "attn1.to_v"), ("attn2.to_k", "attn2.to_v"))


@dataclass(frozen=True)
class Quantization:
    """Which weights of a block are replaced.

    Args:
        precision: ``"fp8"`` or ``"int8"``.
        groups: Indices of weights; those of one group are stacked into one.
    """

    precision: str
    groups: tuple[tuple[int, ...], ...]


PRECISIONS = tuple(_TYPES)


def unavailable_reason(precision: str, device: torch.device) -> str | None:
    """Why linear layers cannot run in this precision on a device, or None."""
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
    without: Sequence[str] = (),
) -> Quantization | None:
    """Choose the weights of a block that are replaced; None when there is none.

    Args:
        names, weights: Of the block.
        precision: One of `PRECISIONS`.
        without: Layers that the graph does not run.
    """
    index = {
        layer: i
        for i, (name, weight) in enumerate(zip(names, weights, strict=True))
        if (layer := name.removesuffix(".weight")) != name
        and layer not in without
        and not layer.endswith(_KEPT)
        and _fits(weight)
    }
    groups = []
    for together in _TOGETHER:
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
    """The 8-bit copies for one block, made in place again when the weights have changed.

    A CUDA graph may read them.

    Attributes:
        made_from: What tells the weights that they were made from; None before.
        was_made: Whether the last `apply` made them.
    """

    def __init__(self, quantization: Quantization) -> None:
        self.quantization = quantization
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._unit: list[torch.Tensor] = []
        self._sources: list[list[torch.Tensor]] = []
        self.made_from: Hashable = None
        self.was_made = False

    @property
    def size_bytes(self) -> int:
        """Memory that the copies hold."""
        return sum(t.numel() * t.element_size() for copies in self._copies for t in copies)

    def would_be_made_from(self, generation: int) -> Hashable:
        """What `made_from` would be if they were made now from the same weights."""
        return (generation, *(content_of(w) for group in self._sources for w in group))

    def apply(self, weights: Sequence[torch.Tensor], generation: int) -> list[torch.Tensor]:
        """A block's weights as its quantised graph takes them: with the copies in place of the
        first of each group, the scales of all groups behind, and with fp8 a scale for inputs of
        at most 1.

        Args:
            weights: Of the block, in the order of the plan.
            generation: Of `TensorContents`.
        """
        self._sources = [[weights[i] for i in group] for group in self.quantization.groups]
        now = self.would_be_made_from(generation)
        self.was_made = now != self.made_from
        if self.was_made:
            if is_observed():
                raise WeightsChangedError("A weight has changed since the forward before it.")
            self.made_from = None  # nothing is known until all of it has happened
            self._make()
            self.made_from = now
        taken = list(weights)
        for group, (copy, _) in zip(self.quantization.groups, self._copies, strict=True):
            taken[group[0]] = copy
        return [*taken, *(scale for _, scale in self._copies), *self._unit]

    def _make(self) -> None:
        precision = self.quantization.precision
        device = self._sources[0][0].device
        if not self._copies or self._copies[0][0].device != device:
            self._copies = [_room(group, precision) for group in self._sources]
            self._unit = _unit(precision, device)
        fill = _fill_fp8 if precision == "fp8" else _fill_int8
        for group, (rows, scales) in zip(self._sources, self._copies, strict=True):
            fill([weight.detach() for weight in group], rows, scales)


def _room(group: Sequence[torch.Tensor], precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    """For weights [N, K]: one matrix [sum of N, K], and its float32 scales: [1], or with whole
    numbers [1, sum of N]."""
    dtype, _ = _TYPES[precision]
    rows, columns, device = sum(w.shape[0] for w in group), group[0].shape[1], group[0].device
    form = (1,) if precision == "fp8" else (1, rows)
    with torch.inference_mode(False):
        return (
            torch.empty(rows, columns, dtype=dtype, device=device),
            torch.empty(form, dtype=torch.float32, device=device),
        )


def _unit(precision: str, device: torch.device) -> list[torch.Tensor]:
    """The scale [1] of numbers that are at most 1, for the precision that needs it."""
    if precision != "fp8":
        return []
    with torch.inference_mode(False):
        return [torch.full((1,), 1 / _TYPES[precision][1], device=device)]


# Few operations, since this is done for each weight of a model.


def _fill_fp8(group: Sequence[torch.Tensor], rows: torch.Tensor, scale: torch.Tensor) -> None:
    most = [torch.linalg.vector_norm(w, torch.inf, dtype=torch.float32) for w in group]
    torch.mul(torch.stack(most).amax(), 1 / _TYPES["fp8"][1], out=scale[0])
    inverse = scale.clamp_min_(_SMALLEST_SCALE).reciprocal()
    sizes = [weight.shape[0] for weight in group]
    for weight, part in zip(group, torch.split(rows, sizes), strict=True):
        part.copy_(weight * inverse)


def _fill_int8(group: Sequence[torch.Tensor], rows: torch.Tensor, scales: torch.Tensor) -> None:
    sizes = [weight.shape[0] for weight in group]
    parts = zip(group, torch.split(rows, sizes), torch.split(scales[0], sizes), strict=True)
    for weight, part, scale in parts:
        most = torch.linalg.vector_norm(weight, torch.inf, dim=-1, dtype=torch.float32)
        torch.mul(most, 1 / _TYPES["int8"][1], out=scale)
        inverse = scale.clamp_min_(_SMALLEST_SCALE).reciprocal()
        part.copy_((weight * inverse.unsqueeze(-1)).round_())


def quantise_rows(
    x: torch.Tensor, precision: str, bound: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] in 8 bits, and the float32 scales that it has to be multiplied by.

    Args:
        x: To be rounded.
        precision: One of `PRECISIONS`.
        bound: [1], what no number of x exceeds; the scale is [1] then, and otherwise [M, 1].
    """
    dtype, limit = _TYPES[precision]
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True) if bound is None else bound
    scale = (most / limit).clamp_min(_SMALLEST_SCALE)
    scaled = (wide / scale).clamp(-limit, limit)
    return (scaled.round() if precision == "int8" else scaled).to(dtype), scale


class QuantizedLinears(TorchFunctionMode):
    """While a block is traced: its linear layers compute with quantised weights.

    Args:
        quantisation: Which.
        weights: The block's weights and what comes with them, from `QuantizedWeights.apply` or
            `outlines`.
        computes_in: The type of a product's result under autocast; None outside of it, where it
            is the input's.
    """

    def __init__(
        self,
        quantization: Quantization,
        weights: Sequence[torch.Tensor],
        computes_in: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._precision, self._computes_in = quantization.precision, computes_in
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor, int, int]] = {}
        self._inputs: dict[int, tuple[torch.Tensor, ...]] = {}
        self._outputs: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._normed: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        if quantization.precision == "fp8":
            *weights, self._unit = weights
        scales = weights[len(weights) - len(quantization.groups) :]
        for group, scale in zip(quantization.groups, scales, strict=True):
            start = 0
            for i in group:
                stacked = weights[group[0]]
                rows = weights[i].shape[0]
                if i == group[0]:
                    rows = stacked.shape[0] - sum(weights[j].shape[0] for j in group[1:])
                self._layers[id(weights[i])] = (stacked, scale, start, start + rows)
                start += rows

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.nn.functional.layer_norm:
            return self._layer_norm(func, args, kwargs or {})
        if func is torch.Tensor.to and id(args[0]) in self._layers:
            return args[0]  # a layer that casts its weight by hand, as Forge's
        layer = None
        if func is torch.nn.functional.linear and len(args) > 1:
            layer = self._layers.get(id(args[1]))
        if layer is None:
            return func(*args, **(kwargs or {}))
        weight, scale, start, end = layer
        bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
        if (start, end) == (0, weight.shape[0]):
            return self._product(args[0], weight, scale, bias)
        known = self._outputs.get((id(args[0]), id(weight)))
        if known is None:  # the input is kept, so that its id stays its own
            known = (args[0], self._product(args[0], weight, scale, None))
            self._outputs[id(args[0]), id(weight)] = known
        output = known[1][..., start:end]
        return output if bias is None else output + bias

    def _layer_norm(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        output = func(*args, **kwargs)
        named = dict(zip(("input", "normalized_shape", "weight", "bias"), args, strict=False))
        named |= kwargs
        weight, bias = named.get("weight"), named.get("bias")
        if weight is not None and bias is not None and weight.ndim == 1:
            self._normed[id(output)] = (output, weight, bias)
        return output

    def _in_8_bits(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `quantise_rows`, once for all layers that read x."""
        if id(x) not in self._inputs:
            bound = None
            if self._precision == "fp8" and id(x) in self._normed:
                _, weight, bias = self._normed[id(x)]
                # Of n numbers with mean 0 and variance 1, none is beyond the root of n.
                root = weight.shape[0] ** 0.5
                bound = (weight.float().abs() * root + bias.float().abs()).amax(0, keepdim=True)
            rows = x.reshape(-1, x.shape[-1])
            self._inputs[id(x)] = (x, *quantise_rows(rows, self._precision, bound))
        _, rows, scales = self._inputs[id(x)]
        return rows, scales

    def _product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        rows, scales = self._in_8_bits(x)
        dtype = self._computes_in or x.dtype
        added = None if bias is None else bias.to(dtype)
        if self._precision == "int8":
            product = torch._int_mm(rows, weight.t()) * scales * scale
        elif scales.ndim == 1:
            inside = None if dtype is torch.float32 else added  # the library adds none to float32
            product = _fp8_product(rows, weight, scales, scale, dtype, inside)
            added = added if inside is None else None
        else:
            # As if the largest number of each row were 1, which float16 has room for.
            product = _fp8_product(rows, weight, self._unit, scale, dtype, None)
            product = product.float() * (scales * _TYPES["fp8"][1])
        product = (product if added is None else product + added).to(dtype)
        return product.reshape(*x.shape[:-1], weight.shape[0])


def _fp8_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """rows [M, K] and weight [N, K] → [M, N] of dtype, with one scale for each."""
    return torch._scaled_mm(
        rows, weight.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=dtype,
        use_fast_accum=True,
    )  # fmt: skip


def outlines(weights: Sequence[torch.Tensor], quantization: Quantization) -> list[torch.Tensor]:
    """Tensors without memory of the forms that `QuantizedWeights.apply` gives."""
    taken, scales = list(weights), []
    for group in quantization.groups:
        taken[group[0]], scale = _room([weights[i] for i in group], quantization.precision)
        taken[group[0]].untyped_storage().resize_(0)
        scale.untyped_storage().resize_(0)
        scales.append(scale)
    return [*taken, *scales, *_unit(quantization.precision, weights[0].device)]
