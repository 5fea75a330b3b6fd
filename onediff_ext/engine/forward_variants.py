"""What tells a model's forwards with equal arguments apart, whatever stands around the model.

A wrapper that computes with other modules for some calls, such as DeepCache, tells it for the
length of a call. Another extension's wrapper or a hook may stand between it and the forward that is
recorded as CUDA graphs, so it is kept by model.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import NamedTuple

from torch import nn


class ForwardVariant(NamedTuple):
    """One way to compute a model's forward.

    Args:
        variant: Distinguishes it from the model's other ways.
        keeps: What a CUDA graph of it has to keep alive.
    """

    variant: Hashable
    keeps: object


_now: weakref.WeakKeyDictionary[nn.Module, ForwardVariant] = weakref.WeakKeyDictionary()


def set_variant(model: nn.Module, variant: ForwardVariant | None) -> None:
    """Tell how a model's forward is computed from now on.

    Args:
        model: Whose forward it is.
        variant: None for the model as it is.
    """
    if variant is None:
        _now.pop(model, None)
    else:
        _now[model] = variant


def variant_of(model: nn.Module) -> ForwardVariant | None:
    """Return how a model's forward is computed now; None for the model as it is.

    Args:
        model: Whose forward it is.
    """
    return _now.get(model)
