"""What Forge, reForge and Neo have in common in how they compute attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

# Functions whose result is that of PyTorch's kernel except for rounding. Functions that quantize
# (sage) are left out: a graph would draw another image than the host.
EXACT = frozenset(
    {
        "attention_pytorch",
        "attention_xformers",
        "attention_flash",
        "attention_basic",
        "attention_split",
        "attention_sub_quad",
    }
)


@dataclass(frozen=True)
class AttentionRules:
    """How the host computes attention, asked at each call.

    Args:
        refusal_reason: Why attention cannot be a graph's just now (an implementation of another
            extension, or one that rounds differently), or None.
        upcasts: Whether scores are computed in float32, given the precision that the block was made
            with (None is the model's own) and the dtype of its input.
    """

    refusal_reason: Callable[[], str | None] = lambda: None
    upcasts: Callable[[torch.dtype | None, torch.dtype], bool] = lambda _wanted, _dtype: False


def inexact_reason(function: object, home: ModuleType, exact: frozenset[str]) -> str | None:
    """Why an attention function may differ from PyTorch's kernel, or None.

    Args:
        function: What the host calls.
        home: The host's Python module of attention.
        exact: Names of functions there whose result is that of PyTorch's kernel.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if name in exact and getattr(home, name, None) is function:
        return None
    return f"attention by {name} is not known to be exact"
