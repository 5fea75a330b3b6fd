"""Undoes what a forward has left in a model: tensors that hold nothing, and scales of wrappers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.weight_slots import WrapperRule, rule_of
from onediff_ext.engine.validity.model_state import attention_processors
from onediff_ext.engine.validity.module_attributes import INTERNAL, is_torchs

# Of what torch keeps in every module, the dictionaries of its tensors.
_PARTS = ("_parameters", "_buffers")
_MISSING = object()
_DEPTH = 3  # of containers in which tensors are looked for


class ScaleRollback:
    """The scales of wrappers such as LoRA layers, at one moment.

    diffusers multiplies each with the scale of a call at the beginning of a forward, and divides it
    at the end. A scale that is a tensor is multiplied in place and divided into a new one. Until
    diffusers 0.36 a forward that fails leaves them multiplied.

    Args:
        rules: Of the wrappers.
        modules: Those of a model, or some of them.
    """

    def __init__(self, rules: Sequence[WrapperRule], modules: Iterable[nn.Module]) -> None:
        found = ((rule_of(m, rules), m) for m in modules) if rules else ()
        scales = [rule.scales(module) for rule, module in found if rule is not None]
        self._scales = [(held, dict(held)) for held in scales if held]
        self._values = [
            (scale, scale.detach().clone())
            for _, before in self._scales
            for scale in before.values()
            if isinstance(scale, torch.Tensor)
        ]

    def restore(self) -> None:
        """Give every wrapper its scales back."""
        for held, before in self._scales:
            for name in _changed(held, before):
                _put_back(held, before, name)
        for scale, value in self._values:
            with torch.inference_mode(scale.is_inference()), torch.no_grad():
                scale.copy_(value)


class AttributeRollback:
    """The attributes of a model's modules and attention processors, at one moment.

    Dictionaries and lists among the attributes are followed, too. Of wrappers the scales count, and
    torch's own modules are left out, since their forwards leave nothing.

    Args:
        model: The host's module.
        rules: Those of its wrappers.
    """

    def __init__(self, model: nn.Module, rules: Sequence[WrapperRule]) -> None:
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any], str]] = []
        self._lists: list[tuple[list[Any], list[Any], str]] = []
        own = []
        for module in model.modules():
            if (rule := rule_of(module, rules)) is not None:
                scales = rule.scales(module)
                self._dicts.append((scales, dict(scales), "scaling"))
            elif not is_torchs(module):
                own.append(module)
        for each in {id(o): o for o in (*own, *attention_processors(own))}.values():
            self._note(each)

    def _note(self, owner: object) -> None:
        fields: dict[str, Any] | None = getattr(owner, "__dict__", None)
        if fields is None:
            return
        self._dicts.append((fields, dict(fields), ""))
        parts = [fields[name] for name in _PARTS if name in fields]
        self._dicts += [(part, dict(part), "") for part in parts]
        for name in fields.keys() - INTERNAL:
            value = fields[name]
            if isinstance(value, dict):
                self._dicts.append((value, dict(value), name))
            elif type(value) is list:
                self._lists.append((value, list(value), name))

    def restore_tensors(self, is_made: Callable[[torch.Tensor], bool]) -> str:
        """Take tensors out that a recording has made, and give back what they have replaced.

        Args:
            is_made: Whether the recording has made a tensor, so that it holds nothing. One in main
                memory was computed, and one of another thread holds its own numbers.

        Returns:
            The name of an attribute that had one; ``""`` if none had.
        """
        found = ""
        for held, before, label in self._dicts:
            for name in _changed(held, before):
                if any(map(is_made, _tensors_in(held.get(name)))):
                    _put_back(held, before, name)
                    found = found or label or str(name)
        for items, had, name in self._lists:
            if not _are(items, had) and any(map(is_made, _tensors_in(items))):
                items[:] = had
                found = found or name
        return found


def scales_of_call(
    model: nn.Module, rules: Sequence[WrapperRule], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ScaleRollback:
    """Return the scales that a forward with these arguments may change.

    Args:
        model: The host's module.
        rules: Those of its wrappers.
        args, kwargs: Of the call. A scale is a number in a dictionary among them.
    """
    dicts = [value for value in (*args, *kwargs.values()) if isinstance(value, dict)]
    has_number = any(isinstance(v, (int, float)) for each in dicts for v in each.values())
    return ScaleRollback(rules, model.modules() if has_number else ())


def _changed(held: dict[Any, Any], before: dict[Any, Any]) -> list[Any]:
    """The names whose objects are others than before."""
    if _are(held.values(), before.values()):
        return []
    names = dict.fromkeys([*held, *before])
    return [n for n in names if held.get(n, _MISSING) is not before.get(n, _MISSING)]


def _put_back(held: dict[Any, Any], before: dict[Any, Any], name: Any) -> None:
    if name in before:
        held[name] = before[name]
    else:
        held.pop(name, None)


def _are(ours: Collection[object], theirs: Collection[object]) -> bool:
    """Whether two collections have the same objects in the same order."""
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


def _tensors_in(value: Any, depth: int = _DEPTH) -> list[torch.Tensor]:
    """The tensors in a value and in the containers within it."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or not isinstance(value, (dict, list, tuple)):
        return []
    inner = list(value.values()) if isinstance(value, dict) else list(value)
    return [tensor for each in inner for tensor in _tensors_in(each, depth - 1)]
