"""What tells a model's forwards with equal arguments apart, whatever stands around the model.

A wrapper that computes with other modules for some calls, such as DeepCache, tells it for the
length of a call. Another extension's wrapper or a hook may stand between it and the forward that is
recorded as CUDA graphs, so it is kept by model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import nn


def _nothing() -> None:
    return None


class KeptTensors(Protocol):
    """Tensors that a forward writes and later ones read, at addresses that CUDA graphs freeze."""

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return those that exist now."""


class ForwardVariant(NamedTuple):
    """One way to compute a model's forward.

    Args:
        variant: Distinguishes it from the model's other ways.
        keeps: What a CUDA graph of it has to keep alive. The memory counts as the CUDA graph's.
        note_replay: Called after a CUDA graph was replayed in place of the forward's Python code.
    """

    variant: Hashable
    keeps: Sequence[KeptTensors]
    note_replay: Callable[[], None] = _nothing


_now: weakref.WeakKeyDictionary[nn.Module, dict[str, ForwardVariant]] = weakref.WeakKeyDictionary()


def set_variant(model: nn.Module, variant: ForwardVariant | None, by: str = "") -> None:
    """Tell how a model's forward is computed from now on.

    Args:
        model: Whose forward it is.
        variant: None for the model as it is.
        by: Names the wrapper. What several of them tell holds together.
    """
    told = _now.setdefault(model, {})
    if variant is None:
        told.pop(by, None)
    else:
        told[by] = variant


def variant_of(model: nn.Module) -> ForwardVariant | None:
    """Return how a model's forward is computed now; None for the model as it is.

    Args:
        model: Whose forward it is.
    """
    told = sorted(_now.get(model, {}).items(), key=lambda item: item[0])
    if len(told) < 2:
        return told[0][1] if told else None

    def note_replay() -> None:
        for _, each in told:
            each.note_replay()

    return ForwardVariant(
        tuple((by, each.variant) for by, each in told),
        tuple(chain.from_iterable(each.keeps for _, each in told)),
        note_replay,
    )
