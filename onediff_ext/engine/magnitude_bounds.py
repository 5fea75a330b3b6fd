"""Bounds for the magnitude of normalised activations, known before their values are.

Of n numbers with mean 0 and variance 1, none exceeds the root of n. So the weights of a LayerNorm
prove a bound for its output, and so do the vectors by which a transformer's block multiplies and
shifts it (adaptive LayerNorm). An fp8 product needs no look at its input then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_PRODUCTS = ("mul", "__mul__", "__rmul__")
_SUMS = ("add", "__add__", "__radd__")


class MagnitudeBounds:
    """The tensors of one trace that have a bound."""

    def __init__(self) -> None:
        # By id; a tensor is kept alive, so that no other one gets its id.
        self._bounds: dict[int, tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}

    def of(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the largest magnitude [1] of a tensor, float32; None when it is unknown.

        Args:
            x: A tensor of this trace.
        """
        known = self._bounds.get(id(x))
        return None if known is None else known[1]()

    def note(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note what a call of torch tells about its output's bound.

        Args:
            func, args, kwargs: The call, as a `TorchFunctionMode` sees it.
            output: Its result.
        """
        if func is torch.nn.functional.layer_norm:
            names = ("input", "normalized_shape", "weight", "bias")
            named = {**dict(zip(names, args, strict=False)), **kwargs}
            self._note_norm(named, output)
        elif getattr(func, "__name__", "") in (*_PRODUCTS, *_SUMS) and not kwargs:
            self._note_modulation(func.__name__ in _PRODUCTS, args, output)

    def _note_norm(self, named: dict[str, Any], output: torch.Tensor) -> None:
        weight, bias = named.get("weight"), named.get("bias")
        if len(named["normalized_shape"]) != 1:
            return
        root = named["normalized_shape"][0] ** 0.5
        if weight is None and bias is None:
            self._bounds[id(output)] = (
                output,
                lambda: torch.full((1,), root, device=output.device, dtype=torch.float32),
            )
        elif weight is not None and bias is not None:
            self._bounds[id(output)] = (
                output,
                lambda: (weight.float().abs() * root + bias.float().abs()).amax(0, keepdim=True),
            )

    def _note_modulation(self, is_product: bool, args: tuple[Any, ...], output: Any) -> None:
        """Note a product or sum of a bounded tensor [B, N, D] with a vector [B, 1, D]."""
        for x, vector in (args, args[::-1]):
            known = self._bounds.get(id(x))
            if known is None or not _is_one_for_all_tokens(vector) or vector.ndim != x.ndim:
                continue
            bound = known[1]

            def bound_of_output(
                bound: Callable[[], torch.Tensor] = bound, vector: torch.Tensor = vector
            ) -> torch.Tensor:
                largest = vector.float().abs().amax().reshape(1)
                return bound() * largest if is_product else bound() + largest

            self._bounds[id(output)] = (output, bound_of_output)
            return


def _is_one_for_all_tokens(vector: Any) -> bool:
    return (
        isinstance(vector, torch.Tensor)
        and vector.ndim == 3
        and isinstance(vector.shape[1], int)
        and vector.shape[1] == 1
    )
