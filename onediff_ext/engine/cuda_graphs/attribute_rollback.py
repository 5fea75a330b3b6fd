"""Undoes what a forward has left in the attributes of a model's modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.weight_slots import WrapperRule, rule_of
from onediff_ext.engine.validity.model_state import attention_processors
from onediff_ext.engine.validity.module_attributes import INTERNAL

# Of what torch keeps in every module, the dictionaries of the module's parts.
_PARTS = ("_parameters", "_buffers", "_modules")
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
        objects = [*modules, *attention_processors(modules)]
        found = {id(d): (d, label) for each in objects for d, label in _dicts_of(each)}
        self._dicts = [(held, dict(held), label) for held, label in found.values()]
        lists = {
            id(value): (value, name)
            for held, _ in found.values()
            for name, value in held.items()
            if type(value) is list
        }
        self._lists = [(held, list(held), name) for held, name in lists.values()]

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
    model: nn.Module, rules: Sequence[WrapperRule], kwargs: Mapping[str, Any]
) -> list[nn.Module]:
    """Return the wrappers whose attributes a forward with these arguments may change.

    diffusers takes the scale of a call from a dictionary among the arguments. Until 0.36 the scales
    of LoRA layers stay changed when the forward fails.

    Args:
        model: The host's module.
        rules: Those of its wrappers.
        kwargs: Of the call.
    """
    if not rules or not any(isinstance(value, dict) for value in kwargs.values()):
        return []
    return [module for module in model.modules() if rule_of(module, rules) is not None]


def _dicts_of(owner: object) -> Iterator[tuple[dict[Any, Any], str]]:
    """An object's attributes, and the dictionaries among them with their names."""
    fields: dict[str, Any] | None = getattr(owner, "__dict__", None)
    if fields is None:
        return
    yield fields, ""
    for name, value in fields.items():
        if isinstance(value, dict) and (name in _PARTS or name not in INTERNAL):
            yield value, "" if name in _PARTS else name


def _changed(held: dict[Any, Any], before: dict[Any, Any]) -> list[Any]:
    """The names whose objects are others than before."""
    if len(held) == len(before) and _are(held.values(), before.values()):
        return []
    names = dict.fromkeys([*held, *before])
    return [n for n in names if held.get(n, _MISSING) is not before.get(n, _MISSING)]


def _put_back(held: dict[Any, Any], before: dict[Any, Any], name: Any) -> None:
    if name in before:
        held[name] = before[name]
    else:
        del held[name]


def _are(ours: Iterable[object], theirs: Iterable[object]) -> bool:
    """Whether two collections have the same objects in the same order."""
    ours, theirs = list(ours), list(theirs)
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


def _has_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value)
