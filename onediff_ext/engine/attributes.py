"""Whether the plain attributes of a model's modules are what they were."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

# What is read anew at every call, or looked at by `BlockTree.holds`.
_CONTAINERS = frozenset({"_parameters", "_buffers", "_modules"})


class Attributes:
    """The instance attributes of all modules at one moment, by identity.

    A `BlockTree` does not look at them at each call. Hosts and extensions set some between
    jobs: the padding of every convolution for pictures that tile, a method of one instance.
    A look at SDXL's UNet takes some milliseconds.

    Args:
        model: Any module. Its own forward does not count, which is no part of any block.
        transient: Names that do not count, as `BlockFamily.transient` has them.
    """

    def __init__(self, model: nn.Module, transient: Collection[str] = ()) -> None:
        ignored = _CONTAINERS.union(transient)
        self._values: list[Any] = []
        for module in model.modules():
            for name, value in module.__dict__.items():
                if name not in ignored and (module is not model or name != "forward"):
                    self._values += (name, value)

    def same(self, other: Attributes) -> bool:
        """Whether every attribute still is the same object."""
        return same_objects(self._values, other._values)


def same_objects(ours: Sequence[object], theirs: Sequence[object]) -> bool:
    """Whether two lists hold the same objects in the same order.

    Not by ``id``, of which each call is an audit event: where something listens to those, as
    filelock does on Python 3.12, each attribute would cost a call into Python.
    """
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))
