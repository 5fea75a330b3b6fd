"""A bound for a normalised activation holds for the worst input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from onediff_ext.engine.magnitude_bounds import MagnitudeBounds

WIDTH = 64


class Watched(TorchFunctionMode):
    """Notes the bounds of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds = MagnitudeBounds()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self.bounds.note(func, args, kwargs or {}, output)
        return output


def one_large() -> torch.Tensor:
    """[1, 1, WIDTH]: of all inputs, its LayerNorm has the largest number."""
    x = torch.zeros(1, 1, WIDTH)
    x[..., 5] = 1e4
    return x


def assert_tight(bound: torch.Tensor | None, values: torch.Tensor) -> None:
    assert bound is not None
    assert bound.shape == (1,)
    largest = values.abs().max()
    assert largest <= bound < 1.1 * largest


@pytest.mark.parametrize("affine", [False, True])
def test_a_layer_norm(affine: bool) -> None:
    norm = nn.LayerNorm(WIDTH, elementwise_affine=affine)
    with torch.no_grad(), Watched() as watched:
        found = norm(one_large())
    assert_tight(watched.bounds.of(found), found)


def test_a_norm_that_is_multiplied_and_shifted_for_each_picture() -> None:
    scale, shift = torch.full((2, WIDTH), 3.0), torch.full((2, WIDTH), -0.5)
    with torch.no_grad(), Watched() as watched:
        found = nn.LayerNorm(WIDTH, elementwise_affine=False)(one_large().expand(2, 3, WIDTH))
        found = found * (1 + scale[:, None]) + (-shift)[:, None]
    assert_tight(watched.bounds.of(found), found)


def test_what_is_not_known_has_no_bound() -> None:
    x = torch.randn(2, 3, WIDTH)
    with torch.no_grad(), Watched() as watched:
        normed = nn.LayerNorm(WIDTH, elementwise_affine=False)(x)
        residual = normed + x
        product = normed * torch.randn(2, 3, WIDTH)
        activated = torch.nn.functional.gelu(normed)
    for tensor in (x, residual, product, activated):
        assert watched.bounds.of(tensor) is None
