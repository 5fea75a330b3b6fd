"""The port between the reuse policy and a host's class of UNet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from onediff_ext.engine.deepcache.features import Feature


@dataclass(frozen=True)
class UNetCall:
    """What decides whether one call may use the feature of another.

    Args:
        kind: Calls of different kinds have features of their own: shape, batch, context.
        state: A feature is only good for a call in the same state: ControlNet, adapters.
        timestep: As the host gave it.
    """

    kind: Hashable
    state: Hashable
    timestep: Any


@dataclass(frozen=True)
class Uncached:
    """Why one call has to be a plain one."""

    reason: str


class UNetAdapter(ABC):
    """Runs the whole of one UNet, or its outermost layers around a cached feature.

    The UNet's own forward is what runs in both cases.
    """

    @abstractmethod
    def describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> UNetCall | Uncached:
        """Sort the arguments of one call; nothing of a tensor's values is read."""

    @abstractmethod
    def max_depth(self) -> int:
        """The largest depth at which anything is left out."""

    @abstractmethod
    def full(self, depth: int, feature: Feature) -> AbstractContextManager[None]:
        """For a ``with`` block, let a forward of the whole UNet write the feature."""

    @abstractmethod
    def shallow(self, depth: int, feature: Feature) -> AbstractContextManager[None]:
        """For a ``with`` block, let a forward run the outermost layers only."""

    @abstractmethod
    def shallow_arguments(
        self, depth: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a shallow forward: what belongs to skipped layers is left out."""


@contextmanager
def replaced(children: Sequence[tuple[nn.Module, str, nn.Module | None]]) -> Iterator[None]:
    """Exchange children of modules for the length of a ``with`` block.

    Args:
        children: (parent, name of its child, what stands there meanwhile).
    """
    before = [parent._modules[name] for parent, name, _ in children]
    try:
        for parent, name, child in children:
            parent._modules[name] = child
        yield
    finally:
        for (parent, name, _), child in zip(children, before, strict=True):
            parent._modules[name] = child
