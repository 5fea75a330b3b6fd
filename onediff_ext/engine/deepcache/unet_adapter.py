"""The port between DeepCache and a host's class of UNet."""

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

from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.core.errors import OptionError
from onediff_ext.engine.class_methods import forward_of
from onediff_ext.engine.deepcache.features import Feature
from onediff_ext.engine.stand_in import StandIn
from onediff_ext.engine.torch_versions import OutOfMemoryError, is_dynamo_tracing


@dataclass(frozen=True)
class UNetCall:
    """The inputs that decide whether one call may use the feature of another.

    Args:
        kind: Shape, batch, context. Each kind has a feature of its own.
        state: ControlNet, adapters. A feature serves only calls in the same state.
        batch: Images at once, CFG's counted.
        latent: [B, 4, H/8, W/8] of the picture, where the host may call the UNet several times in
            one evaluation; None where it does not.
    """

    kind: Hashable
    state: Hashable
    batch: int
    latent: torch.Tensor | None = None


@dataclass(frozen=True)
class Uncached:
    """Why one call runs without DeepCache."""

    reason: str


class UNetAdapter(ABC):
    """Runs the whole of one UNet, or its outermost layers around a cached feature.

    The UNet's own forward is what runs in both cases.
    """

    @abstractmethod
    def describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> UNetCall | Uncached:
        """Sort the arguments of one call, without reading the values of tensors.

        Args:
            args, kwargs: Of the UNet's forward.

        Returns:
            The call, or why it runs without DeepCache.
        """

    @abstractmethod
    def max_depth(self) -> int:
        """The largest depth at which a shallow forward still leaves out layers."""

    def check(self, options: DeepCacheOptions) -> None:
        """Check that a shallow forward leaves out layers.

        Args:
            options: With the depth.

        Raises:
            OptionError: The depth leaves out no layer.
        """
        if options.is_on and options.depth > self.max_depth():
            raise OptionError(
                f"A DeepCache depth of {options.depth} leaves nothing of this UNet out.",
                f"Choose 0 to {self.max_depth()}.",
            )

    @abstractmethod
    def full(self, depth: int, feature: Feature) -> AbstractContextManager[None]:
        """Return a context in which a forward of the whole UNet writes the feature.

        Args:
            depth: As `DeepCacheOptions.depth`.
            feature: Of this kind of call.
        """

    @abstractmethod
    def shallow(self, depth: int, feature: Feature) -> AbstractContextManager[None]:
        """Return a context in which a forward runs the outermost layers only.

        Args:
            depth: As `full` takes it.
            feature: Written by a full forward of the same depth.
        """

    @abstractmethod
    def shallow_arguments(
        self, depth: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a shallow forward, without those that belong to skipped layers.

        Args:
            depth: As `full` takes it.
            args, kwargs: Of the call.

        Returns:
            Positional and keyword arguments; those of the call stay as they are.
        """


class Replay:
    """A forward that returns a copy of a feature, whatever it is called with.

    Args:
        feature: What it returns; not kept alive.

    Raises:
        torch.OutOfMemoryError: By a call with another batch: short of memory, the model runs in
            halves, and nothing tells which half this is.
    """

    capturable = True

    def __init__(self, feature: Feature) -> None:
        self._feature = weakref.ref(feature)  # the feature holds this

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        feature = self._feature()
        assert feature is not None
        assert feature.tensor is not None
        if hidden.shape[0] != feature.tensor.shape[0]:
            raise OutOfMemoryError("DeepCache: a shallow call cannot be halved")
        return feature.tensor.clone()  # hosts change hidden states in place (FreeU)


class Keeping(StandIn):
    """A module's forward that also copies its output into a feature.

    Args:
        forward: The module's own.
        feature: Where the output goes; not kept alive.
    """

    capturable = True

    def __init__(self, forward: Callable[..., Any], feature: Feature) -> None:
        self._forward, self._feature = forward, weakref.ref(feature)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self._forward, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_tracing():
            return self._forward(*args, **kwargs)
        output = self._forward(*args, **kwargs)
        feature = self._feature()
        assert feature is not None
        feature.store(output[0] if isinstance(output, tuple) else output)
        return output


@contextmanager
def keeping(module: nn.Module, feature: Feature) -> Iterator[None]:
    """A context in which a module's output is copied into a feature.

    A hook would not do: CUDA graphs treat hooks as another extension's.

    Args:
        module: Whose output it is.
        feature: Where it goes.
    """
    attributes = vars(module)
    own = attributes.get("forward")
    # The same object each time: another one would be a change of the model for a CUDA graph.
    made = feature.parts.get("keeping")
    if made is None or made[:2] != (module, own):
        made = (module, own, Keeping(forward_of(module), feature))
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
    """A context in which modules have other children.

    Args:
        children: (parent, name of its child, the child meanwhile).
    """
    before = [parent._modules[name] for parent, name, _ in children]
    try:
        for parent, name, child in children:
            parent._modules[name] = child
        yield
    finally:
        for (parent, name, _), child in zip(children, before, strict=True):
            parent._modules[name] = child
