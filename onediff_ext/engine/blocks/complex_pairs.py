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
    """A complex tensor as its real and its imaginary part.

    Args:
        real, imaginary: Tensors of one shape.
    """

    def __init__(self, real: torch.Tensor, imaginary: torch.Tensor) -> None:
        self.real, self.imaginary = real, imaginary

    def unsqueeze(self, dim: int) -> ComplexPair:
        """As the tensor's method."""
        return ComplexPair(self.real.unsqueeze(dim), self.imaginary.unsqueeze(dim))

    def __mul__(self, other: ComplexPair) -> ComplexPair:
        return ComplexPair(
            self.real * other.real - self.imaginary * other.imaginary,
            self.real * other.imaginary + self.imaginary * other.real,
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.view_as_real:
            return torch.stack([args[0].real, args[0].imaginary], -1)
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
            return ComplexPair(*args[0].unbind(-1))
        return func(*args, **(kwargs or {}))
