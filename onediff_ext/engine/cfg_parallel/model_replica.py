"""A copy of a model on another device, which follows the model: weights, LoRAs, attributes."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from enum import Enum
from types import MethodType
from typing import Any

import torch
from torch import nn

from onediff_ext.core.errors import ReplicaError
from onediff_ext.engine.class_methods import ClassForward
from onediff_ext.engine.cuda_graphs.staleness import Snapshot
from onediff_ext.engine.cuda_graphs.trusted_modules import TrustedModules
from onediff_ext.engine.validity.tensor_contents import TensorContents, content_of, version_of
from onediff_ext.engine.weak_tensors import WeakTensors


class Difference(Enum):
    """What a model has that its replica has not."""

    NOTHING = "nothing"
    CODE = "code"  # both run other code now
    WEIGHTS = "weights"  # other values; `ModelReplica.copy_weights`
    MORE = "more"  # modules, attributes; another replica is needed


class ModelReplica:
    """A model's copy on another device.

    Args:
        source: The model; a snapshot of it must refuse nothing.
        known: What its modules may be.
        device: Where the copy lies.

    Attributes:
        model: The copy.
        device: As given.

    Raises:
        ReplicaError: A weight is of another class than torch's.
        Exception: The model cannot be copied. torch, and the classes of a model's attributes,
            raise various types.
    """

    def __init__(self, source: nn.Module, known: TrustedModules, device: torch.device) -> None:
        self.device, self._known = device, known
        self._snapshot = Snapshot(source, known)
        self._contents, self._generation = TensorContents(), 0
        sources = _tensors_of(source)
        with torch.inference_mode(False), torch.no_grad():
            self._copies = [_copied(tensor, device) for tensor in sources]
            memo: dict[int, Any] = dict(zip(map(id, sources), self._copies, strict=True))
            self.model: nn.Module = copy.deepcopy(source, memo)
        _remove_own_methods(self.model)
        self._source = source
        self._note(sources)

    def difference(self, epoch: Hashable) -> Difference:
        """Return what has changed of the model since the copy was made or last followed it.

        Args:
            epoch: Equal for the calls of one image. Writes that torch does not count are found
                once for them.
        """
        found = Difference.NOTHING
        if not self._snapshot.holds(epoch):
            found = self._difference_of_state()
        if found in (Difference.MORE, Difference.WEIGHTS):
            return found
        sources = self._sources.alive()
        if sources is None:
            return Difference.MORE
        known, self._generation = self._generation, self._contents.current_generation(epoch)
        is_same = known == self._generation and self._stamps == list(map(content_of, sources))
        return found if is_same else Difference.WEIGHTS

    def _difference_of_state(self) -> Difference:
        moved = self._snapshot.at_new_places()
        if moved is not None:
            self._snapshot = moved
            return Difference.WEIGHTS
        if self._snapshot.holds_but_for_code():
            now = Snapshot(self._source, self._known)
            if now.refusal_reason is None:
                self._snapshot = now
                return Difference.CODE
        return Difference.MORE

    def weights_are_unwritten(self) -> bool:
        """Return whether torch counts no write to the model's weights since, where they lie."""
        sources = self._sources.alive()
        return sources is not None and list(map(version_of, sources)) == self._versions

    def copy_weights(self) -> None:
        """Give the copy the weights that the model has now."""
        sources = _tensors_of(self._source)
        with torch.no_grad():
            for target, source in zip(self._copies, sources, strict=True):
                target.copy_(source, non_blocking=True)
        self._note(sources)

    def _note(self, sources: list[torch.Tensor]) -> None:
        self._sources = WeakTensors(sources)
        self._stamps = list(map(content_of, sources))
        self._versions = list(map(version_of, sources))
        self._contents.watch(sources)
        self._contents.settle()
        self._generation = self._contents.current_generation(None)


def _tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the same tensor elsewhere, with its strides; a parameter as a parameter."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise ReplicaError(f"a weight is stored as {type(tensor).__qualname__}")
    copied = torch.empty_like(tensor, device=device, requires_grad=False)
    copied.copy_(tensor, non_blocking=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied


def _remove_own_methods(model: nn.Module) -> None:
    """Remove the methods that stood in place of graphs' runners: each class has its own."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_class_s = (
                isinstance(value, MethodType)
                and value.__self__ is module
                and getattr(type(module), name, None) is value.__func__
            )
            if is_class_s or (name == "forward" and value == ClassForward(module)):
                delattr(module, name)
