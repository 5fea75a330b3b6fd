"""The arithmetic of quantized linear layers, with which a block's graph is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onediff_ext.engine.magnitude_bounds import MagnitudeBounds
from onediff_ext.engine.quantization import EIGHT_BIT_TYPES, SMALLEST_SCALE, Quantization


def quantize_rows(
    x: torch.Tensor, precision: str, bound: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a layer's input to 8 bits.

    Args:
        x: [M, K].
        precision: One of `PRECISIONS`.
        bound: [1], the largest magnitude that x can have; None measures it for each row.

    Returns:
        x [M, K] in 8 bits, and the float32 scales to multiply it by: [1] with a bound, otherwise
        [M, 1].
    """
    dtype, limit = EIGHT_BIT_TYPES[precision]
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True) if bound is None else bound
    scale = (largest / limit).clamp_min(SMALLEST_SCALE)
    scaled = (wide / scale).clamp(-limit, limit)
    return (scaled.round() if precision == "int8" else scaled).to(dtype), scale


class QuantizedLinears(TorchFunctionMode):
    """Makes linear layers compute with quantized weights while a block is traced.

    Args:
        quantization: Which weights are 8-bit copies.
        weights: From `QuantizedWeights.apply` or `outlines`.
        computes_in: Dtype of a product's result under autocast; None outside of it, where it is
            the input's dtype.
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
        self._bounds = MagnitudeBounds()
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
        if func is torch.Tensor.to and id(args[0]) in self._layers:
            return args[0]  # the layer casts its weight itself
        layer = None
        if func is torch.nn.functional.linear and len(args) > 1:
            layer = self._layers.get(id(args[1]))
        if layer is None:
            output = func(*args, **(kwargs or {}))
            if self._precision == "fp8":
                self._bounds.note(func, args, kwargs or {}, output)
            return output
        weight, scale, start, end = layer
        bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
        if (start, end) == (0, weight.shape[0]):
            return self._product(args[0], weight, scale, bias)
        known = self._outputs.get((id(args[0]), id(weight)))
        if known is None:  # keeps the input alive, so that no other tensor gets its id
            known = (args[0], self._product(args[0], weight, scale, None))
            self._outputs[id(args[0]), id(weight)] = known
        output = known[1][..., start:end]
        return output if bias is None else output + bias

    def _in_8_bits(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply `quantize_rows` once for all layers that read x [..., K]."""
        if id(x) not in self._inputs:
            bound = self._bounds.of(x)
            rows = x.reshape(-1, x.shape[-1])
            self._inputs[id(x)] = (x, *quantize_rows(rows, self._precision, bound))
        _, rows, scales = self._inputs[id(x)]
        return rows, scales

    def _product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        # x [..., K], weight [N, K], scale [1] or [1, N], bias [N] → [..., N]
        rows, scales = self._in_8_bits(x)
        dtype = self._computes_in or x.dtype
        added = None if bias is None else bias.to(dtype)
        if self._precision == "int8":
            product = torch._int_mm(rows, weight.t()) * scales * scale
        elif scales.ndim == 1:
            inside = None if dtype is torch.float32 else added  # float32 takes no bias inside
            product = _fp8_product(rows, weight, scales, scale, dtype, inside)
            added = added if inside is None else None
        else:
            # As if the largest number of each row were 1: float16 holds that product.
            product = _fp8_product(rows, weight, self._unit, scale, dtype, None)
            product = product.float() * (scales * EIGHT_BIT_TYPES["fp8"][1])
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
    """Multiply rows [M, K] by a weight [N, K], with one scale for each → [M, N] of dtype."""
    return torch._scaled_mm(
        rows, weight.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=dtype,
        use_fast_accum=True,
    )  # fmt: skip
