"""A quick check that a model's derived weights would still be made from the same things."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from onediff_ext.engine.blocks.weight_form import layout_of
from onediff_ext.engine.running.block_weights import BlockWeights
from onediff_ext.engine.validity.module_attributes import INTERNAL, is_torchs
from onediff_ext.engine.validity.once_per_image import OncePerImage
from onediff_ext.engine.validity.tensor_contents import version_of
from onediff_ext.engine.validity.values import copy_of, is_equal, is_mutable, value_of
from onediff_ext.engine.weak_tensors import WeakTensors

_CONTAINERS = (list, dict, set)
_MADE_FROM = operator.attrgetter("made_from")
_VERSION = operator.attrgetter("_version")


class DerivedStamp:
    """Everything that decides the derived weights of some blocks, at one moment.

    `WrapperRule.state` is read layer by layer: with SDXL and a LoRA that takes longer than a step
    at 512x512. A stamp compares the same things, and more, as a few long lists. It belongs to one
    snapshot of the model, which compares modules, Parameters and code, and must hold whenever the
    stamp is made or asked. So a stamp compares only what a snapshot leaves out: what is written
    into the sources of derived weights, and all attributes of wrappers. Some of these decide
    nothing: when a stamp does not hold, `WrapperRule.state` is read.

    Args:
        weights: The weights of the model's blocks. All belong to one `KindRegistry`.
    """

    def __init__(self, weights: Sequence[BlockWeights]) -> None:
        self._weights = weights
        self._slots = [slot for each in weights for slot in each.wrapped_slots]
        self._parts, self._made_from = self._read_parts(), list(map(_MADE_FROM, self._slots))
        self._generation = self._read_generation()
        tensors = list({id(t): t for each in weights for t in each.derived_sources()}.values())
        self._sources = WeakTensors(tensors)
        self._written, self._layouts = _writes_of(tensors), list(map(layout_of, tensors))
        around = {id(m): m for slot in self._slots for m in slot.wrapper_modules()}
        self._fields = [m.__dict__ for m in around.values() if not is_torchs(m)]
        self._names, self._values = self._read_names(), self._read_values()
        held = [v for fields in self._fields for v in _mutable_values(fields)]
        self._held = [value for value in held if type(value) in _CONTAINERS]
        self._copies = list(map(copy_of, self._held))
        self._objects = [(v, value_of(v)) for v in held if type(v) not in _CONTAINERS]
        self._form = OncePerImage()

    def holds(self, epoch: Hashable = None) -> bool:
        """Return whether the derived weights would be made from the same things.

        Args:
            epoch: Equal for the calls of one image; layouts of weights and names of attributes are
                read once for them. None reads them each time.
        """
        if not _are(self._parts, self._read_parts()):
            return False
        if not _are(self._made_from, list(map(_MADE_FROM, self._slots))):
            return False
        tensors = self._sources.alive()
        if tensors is None or self._read_generation() != self._generation:
            return False
        return (
            _writes_of(tensors) == self._written
            and self._form.holds(epoch, partial(self._have_their_form, tensors))
            and _are(self._values, self._read_values())
            and is_equal(self._held, self._copies)
            and all(is_equal(value_of(value), content) for value, content in self._objects)
        )

    def _have_their_form(self, tensors: Sequence[torch.Tensor]) -> bool:
        has_layouts = list(map(layout_of, tensors)) == self._layouts
        return has_layouts and self._read_names() == self._names

    def _read_parts(self) -> list[object]:
        return list(chain.from_iterable(each.derived_parts() for each in self._weights))

    def _read_generation(self) -> int | None:
        return self._weights[0].generation if self._weights else None

    def _read_names(self) -> list[str]:
        return list(chain.from_iterable(self._fields))

    def _read_values(self) -> list[object]:
        return list(chain.from_iterable(map(dict.values, self._fields)))


def _are(ours: Sequence[object], theirs: Sequence[object]) -> bool:
    """Whether two sequences have the same objects."""
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


def _writes_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[Hashable]]:
    """Where the tensors lie, and how often each was written."""
    places = list(map(torch.Tensor.data_ptr, tensors))
    try:
        return places, list(map(_VERSION, tensors))
    except RuntimeError:  # some count no writes
        return places, list(map(version_of, tensors))


def _mutable_values(fields: dict[str, Any]) -> list[Any]:
    return [v for name, v in fields.items() if name not in INTERNAL and is_mutable(v)]
