"""What Forge, reForge and Neo have in common in how they compute attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

import torch

from onediff_ext.engine.validity.foreign_code import defining_module

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
        vae_refusal_reason: The same of VAEs, whose attention is another function.
        upcasts: Whether scores are computed in float32, given the precision that the block was made
            with (None is the model's own) and the dtype of its input.
        advice: As `inexact_reason` takes it.
    """

    refusal_reason: Callable[[], str | None] = lambda: None
    vae_refusal_reason: Callable[[], str | None] = lambda: None
    upcasts: Callable[[torch.dtype | None, torch.dtype], bool] = lambda _wanted, _dtype: False
    advice: Mapping[str, str] = field(default_factory=dict)


def inexact_reason(
    function: object,
    home: ModuleType,
    exact: frozenset[str],
    advice: Mapping[str, str] | None = None,
) -> str | None:
    """Why an attention function may differ from PyTorch's kernel, or None.

    An extension may put a function of its own, under a known name, into every module of the host.

    Args:
        function: What the host calls.
        home: The host's Python module of attention.
        exact: Names of functions there whose result is that of PyTorch's kernel.
        advice: What to change to have another function, by the names of some.
    """
    name = getattr(function, "__name__", type(function).__name__)
    is_homes = getattr(home, name, None) is function and defining_module(function) == home.__name__
    if name in exact and is_homes:
        return None
    change = (advice or {}).get(name)
    return f"attention by {name} is not known to be exact" + (f": {change}" if change else "")
