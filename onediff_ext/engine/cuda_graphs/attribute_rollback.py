"""Undoes what a forward has left in the attributes of a model's modules."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.weight_slots import WrapperRule, rule_of
from onediff_ext.engine.validity.model_state import attention_processors
from onediff_ext.engine.validity.module_attributes import INTERNAL

# Of what torch keeps in every module, the dictionaries of its tensors.
_PARTS = ("_parameters", "_buffers")
_MISSING = object()


class AttributeRollback:
    """The attributes of modules and of their attention processors, at one moment.

    Dictionaries and lists among the attributes are followed one level deep, by identity of what
    they hold. A forward may change them: diffusers multiplies the scale of each LoRA layer with the
    scale of the call, and divides it afterwards. A scale that is a tensor is another one then.

    Args:
        modules: The modules, without those within them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any], str]] = []
        self._lists: list[tuple[list[Any], list[Any], str]] = []
        for each in {id(o): o for o in (*modules, *attention_processors(modules))}.values():
            self._note(each)

    def _note(self, owner: object) -> None:
        fields: dict[str, Any] | None = getattr(owner, "__dict__", None)
        if fields is None:
            return
        self._dicts.append((fields, dict(fields), ""))
        self._dicts += [(part, dict(part), "") for n in _PARTS if (part := fields.get(n))]
        for name in fields.keys() - INTERNAL:
            value = fields[name]
            if isinstance(value, dict):
                self._dicts.append((value, dict(value), name))
            elif type(value) is list:
                self._lists.append((value, list(value), name))

    def restore(self) -> None:
        """Give every attribute the object back that it had."""
        for held, before, _ in self._dicts:
            for name in _changed(held, before):
                _put_back(held, before, name)
        for items, had, _ in self._lists:
            if not _are(items, had):
                items[:] = had

    def restore_tensors(self) -> str:
        """Give back what new tensors have replaced, and remove other new tensors.

        Returns:
            The name of an attribute that had one; ``""`` if none had.
        """
        found = ""
        for held, before, label in self._dicts:
            for name in _changed(held, before):
                if _has_tensor(held.get(name)):
                    _put_back(held, before, name)
                    found = found or label or str(name)
        for items, had, name in self._lists:
            if not _are(items, had) and _has_tensor(items):
                items[:] = had
                found = found or str(name)
        return found


def scaled_wrappers(
    model: nn.Module, rules: Sequence[WrapperRule], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[nn.Module]:
    """Return the wrappers whose attributes a forward with these arguments may change.

    diffusers takes the scale of a call from a dictionary among the arguments. Until 0.36 the scales
    of LoRA layers stay changed when the forward fails.

    Args:
        model: The host's module.
        rules: Those of its wrappers.
        args, kwargs: Of the call.
    """
    dicts = [value for value in (*args, *kwargs.values()) if isinstance(value, dict)]
    if not rules or not any(isinstance(v, (int, float)) for each in dicts for v in each.values()):
        return []
    return [module for module in model.modules() if rule_of(module, rules) is not None]


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
        del held[name]


def _are(ours: Collection[object], theirs: Collection[object]) -> bool:
    """Whether two collections have the same objects in the same order."""
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


def _has_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value)
