"""The port between the reuse policy and a host's class of UNet."""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.deepcache.features import Feature
from onediff_ext.engine.torch_versions import OutOfMemoryError


@dataclass(frozen=True)
class UNetCall:
    """What decides whether one call may use the feature of another.

    Args:
        kind: Calls of different kinds have features of their own: shape, batch, context.
        state: A feature is only good for a call in the same state: ControlNet, adapters.
        batch: Pictures at once, CFG's counted.
    """

    kind: Hashable
    state: Hashable
    batch: int


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


class Replay:
    """A forward that gives back a feature, whatever it is called with.

    Raises:
        torch.OutOfMemoryError: Short of memory, the model is run in halves, and which one this is
            cannot be told.
    """

    capturable = True

    def __init__(self, feature: Feature) -> None:
        self._feature = weakref.ref(feature)  # which holds us

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        feature = self._feature()
        assert feature is not None
        assert feature.tensor is not None
        if hidden.shape[0] != feature.tensor.shape[0]:
            raise OutOfMemoryError("DeepCache: a shallow call cannot be halved")
        return feature.tensor.clone()  # hosts change hidden states in place (FreeU)


class Keeping:
    """A module's forward that also writes what it returns into a feature."""

    capturable = True

    def __init__(self, forward: Callable[..., Any], feature: Feature) -> None:
        self._forward, self._feature = forward, weakref.ref(feature)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self._forward, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        feature = self._feature()
        assert feature is not None
        feature.store(output[0] if isinstance(output, tuple) else output)
        return output


@contextmanager
def keeping(module: nn.Module, feature: Feature) -> Iterator[None]:
    """For a ``with`` block, write into a feature what a module returns.

    No hook does it, since to a capture a hook is another extension's.
    """
    attributes = vars(module)
    own = attributes.get("forward")
    # The same object each time, or a capture would take the model for a changed one.
    made = feature.parts.get("keeping")
    if made is None or made[:2] != (module, own):
        made = (module, own, Keeping(module.forward, feature))
        feature.parts["keeping"] = made
    attributes["forward"] = made[2]
    try:
        yield
    finally:
        if own is None:
            del attributes["forward"]
        else:
            attributes["forward"] = own


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
