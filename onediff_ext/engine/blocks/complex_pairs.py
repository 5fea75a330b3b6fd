"""Complex products in real arithmetic, for blocks that are traced.

Compilers make no code for complex numbers. Blocks use them for one thing: RoPE views pairs of
numbers as complex ones, multiplies them by a table, and views the product as real again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class ComplexPair:
    """A complex tensor as pairs of its real and its imaginary part.

    Args:
        pairs: [..., 2].
    """

    def __init__(self, pairs: torch.Tensor) -> None:
        self.pairs = pairs

    def unsqueeze(self, dim: int) -> ComplexPair:
        """Insert a dim of size 1, as the method of a complex tensor does.

        Args:
            dim: Where, counted without the dim of the pairs; from the end if negative.

        Returns:
            A view of the same pairs, [..., 1, ..., 2].
        """
        return ComplexPair(self.pairs.unsqueeze(dim if dim >= 0 else dim - 1))

    def __mul__(self, other: ComplexPair) -> ComplexPair:
        # (a + bi)(c + di) = (ac - bd) + (bc + ad)i. To swap a pair is another index for a compiler,
        # where stacking two halves is a pass of its own.
        real, imaginary = other.pairs[..., :1], other.pairs[..., 1:]
        sign = torch.arange(-1, 3, 2, device=imaginary.device, dtype=imaginary.dtype)
        return ComplexPair(self.pairs * real + self.pairs.flip(-1) * (imaginary * sign))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.view_as_real:
            return args[0].pairs
        return NotImplemented


class RealArithmetic(TorchFunctionMode):
    """Makes ``torch.view_as_complex`` return a `ComplexPair`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.view_as_complex:
            return ComplexPair(args[0])
        return func(*args, **(kwargs or {}))
