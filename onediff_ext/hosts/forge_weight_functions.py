"""LoRAs that Neo and reForge add to a layer's weight at each call, since it is in main memory."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.key_text import qualified_name
from onediff_ext.engine.blocks.weight_functions import (
    FunctionState,
    WeightFunctionRule,
    functions_of,
)
from onediff_ext.engine.validity.foreign_code import defining_module, written_function

COPY_HELPERS = ("cast_to_device", "cast_to", "device_supports_non_blocking")
"""Names of the functions by which these hosts bring a LoRA's matrices to the GPU."""


class LowVramPatches(WeightFunctionRule):
    """Knows the functions of a host's ``LowVramPatch``.

    Such an object merges the patches of one weight: it reads ``patches[key]`` of the model's
    patcher at each call. A patch is a tuple of its strength, what to add, the strength of the
    weight itself, a part of the weight, and a function.

    Args:
        patch: Full name of the host's class ``LowVramPatch``.
        lora: Full name of its class of a LoRA's matrices.
        helpers: Modules of the host and names of functions there that both call.
    """

    attributes: Mapping[str, str] = {"weight": "weight_function", "bias": "bias_function"}

    def __init__(self, patch: str, lora: str, helpers: Mapping[str, Sequence[str]]) -> None:
        self.patch, self.lora, self.helpers = patch, lora, helpers
        self._packages = tuple({f"{name.partition('.')[0]}." for name in (patch, lora)})

    def is_known(self, function: object) -> bool:
        return qualified_name(type(function)) == self.patch

    def state(self, function: Any) -> FunctionState | None:
        values: list[Any] = []
        objects: list[Any] = []
        try:
            patches = function.patches[function.key]
            for strength, added, weight_strength, part, applied, *_ in patches:
                if applied is not None:
                    return None
                found = self._lora_parts(added) or _difference_parts(added)
                if found is None:
                    return None
                own_values, own_objects = found
                part = None if part is None else tuple(part)
                values.append((strength, weight_strength, part, *own_values))
                objects += own_objects
        except (AttributeError, KeyError, TypeError, ValueError):  # of another version's form
            return None
        return FunctionState((function.key, *values), tuple(objects))

    def code(self) -> Sequence[object] | None:
        found: list[object] = []
        for home, names in self.helpers.items():
            namespace = vars(sys.modules[home]) if home in sys.modules else {}
            for name in names:
                value = namespace.get(name)
                function = written_function(value)
                if value is None:  # another version
                    continue
                if not isinstance(function, types.FunctionType) or not defining_module(
                    function
                ).startswith(self._packages):
                    return None
                found += (value, function, function.__code__)
        return found

    def tensors(self, model: nn.Module) -> Iterator[torch.Tensor]:
        """Return the tensors that functions on a model's weights read, as far as they are known.

        Args:
            model: Loaded by the host, as far as it fits.
        """
        for layer in model.modules():
            for functions in functions_of(layer, (self,)).values():
                for state in functions.states() or ():
                    yield from state.tensors

    def _lora_parts(self, added: Any) -> tuple[list[Any], list[Any]] | None:
        """The numbers and objects that decide a LoRA's matrix; None for anything else."""
        if qualified_name(type(added)) != self.lora:
            return None
        up, down, alpha, middle, magnitude, shape = added.weights
        if magnitude is not None or shape is not None:  # DoRA, or a weight of another shape
            return None
        return [alpha], [added, up, down, *(() if middle is None else (middle,))]


def _difference_parts(added: Any) -> tuple[list[Any], list[Any]] | None:
    """The same for a tensor that is added as it is."""
    if type(added) is tuple and len(added) == 2 and added[0] == "diff":
        added = added[1]
    if type(added) in (tuple, list) and len(added) == 1 and isinstance(added[0], torch.Tensor):
        return [], [added[0]]
    return None
