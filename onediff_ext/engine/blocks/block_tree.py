"""The modules and weights of one block as they are now: identity, weights, a copy to trace."""

from __future__ import annotations

import copy
import hashlib
import sys
import types
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.weight_slots import Layout, WeightSlot, WrapperRule, layout_of
from onediff_ext.engine.validity.module_state import INTERNAL, ModuleState, interfering_in
from onediff_ext.engine.validity.python_code import (
    PythonCode,
    foreign_class,
    foreign_methods,
    home_of,
    is_ours,
    is_put_back,
    reads_attribute,
    surroundings_reason,
)

_PLAIN = (type(None), bool, int, float, str, torch.dtype)
# What else decides nothing: a model's own record of how it was made, and what a layer has made of
# attributes that count by themselves.
_DERIVED = INTERNAL | {
    "forward",
    "_chunk_dim",
    "_from_deprecated_attn_block",
    "_gradient_checkpointing_func",
    "_internal_dict",
    "_reversed_padding_repeated_twice",
}


class BlockTree:
    """What a block consists of at one moment.

    Args:
        block: To look at.
        packages: Beginnings of the full names of classes that it may consist of, besides torch's.
        rules: Wrappers around its layers.
        parts: The children that count; None for all.
        transient: As `BlockFamily.transient`.
        interfering: As `BlockFamily.interfering`.
        patchers: As `BlockFamily.patchers`.
        code: Of this process.

    Attributes:
        refusal_reason: Why no graph may stand for this block, or None.
        entries: The parts of the kind's key that the block itself gives.
        names: Full names of the weights, in the order of `weights()`.
        drops: Whether something inside computes otherwise in training mode. Forge leaves
            its UNet in that mode, with a dropout of nothing.
    """

    def __init__(
        self,
        block: nn.Module,
        packages: Sequence[str],
        rules: Sequence[WrapperRule] = (),
        parts: Sequence[str] | None = None,
        ignored_attrs: frozenset[str] = frozenset(),
        dynamic_weight_attrs: tuple[str, ...] = (),
        trusted_patchers: tuple[str, ...] = (),
        code: PythonCode | None = None,
    ) -> None:
        self.refusal_reason: str | None = None
        self._parts, self._transient, self._interfering = parts, ignored_attrs, dynamic_weight_attrs
        self._patchers = trusted_patchers
        self._packages = ("torch.nn.modules", *packages)
        self._block = block
        self.drops = any(_drops(module) for module in block.modules())
        self._rules = tuple(rules)
        self._modules: list[nn.Module] = []
        self._wrappers: list[nn.Module] = []
        self.slots: list[WeightSlot] = []
        self._code = PythonCode() if code is None else code
        lines: list[str] = []
        self._sources: set[str] = set()
        self._visit("", block, lines, inner=False)
        self.names = tuple(slot.path for slot in self.slots)
        self._look_at_code()
        self._state = ModuleState(self._modules, block, ignored=ignored_attrs, bare=self._wrappers)
        self._interferes = self._read_interfering()
        self._describe_weights(lines)

    def _visit(
        self,
        path: str,
        module: nn.Module,
        lines: list[str],
        *,
        inner: bool,
        wrapped: tuple[WrapperRule, nn.Module] | None = None,
    ) -> None:
        self._modules.append(module)
        self._judge(path or "the block", module, inner)
        if not _qualname(type(module)).startswith(self._packages):
            self._refuse(f"{path or 'the block'} is a {type(module).__qualname__}, not known here")
        self._sources.add(type(module).__module__)
        lines.append(f"{path}: {_qualname(type(module))} {self._describe_attributes(module)}")
        prefix = f"{path}." if path else ""
        for holder, merges in ((module._parameters, True), (module._buffers, False)):
            for name, weight in holder.items():
                if weight is not None:
                    by = wrapped if merges and name == "weight" else None
                    self.slots.append(WeightSlot(prefix + name, holder, name, by))
        for name, child in module._modules.items():
            if child is None or not (inner or self._parts is None or name in self._parts):
                continue
            found = next((r for r in self._rules if r.matches(child)), None)
            if found is None:
                self._visit(prefix + name, child, lines, inner=True)
                continue
            reason = found.refusal_reason(child)
            if reason is not None:
                self._refuse(f"{prefix}{name}: {reason}")
            base = found.base(child)
            around = [m for m in child.modules() if m is not base]
            self._modules += around
            self._wrappers += around
            for module_around in around:
                self._judge(f"{prefix}{name}", module_around, True)
            self._visit(prefix + name, base, lines, inner=True, wrapped=(found, child))

    def _look_at_code(self) -> None:
        """Note the code that runs in this block, and refuse what others have replaced of it."""
        processors = [vars(module).get("processor") for module in self._modules]
        classes = {type(module) for module in self._modules}
        classes |= {type(processor) for processor in processors if processor is not None}
        self._code.watch(classes)
        self._generation = self._code.look()
        self._hook_reason = surroundings_reason()
        for cls in sorted(classes, key=_qualname):
            patched = foreign_class(cls, self._patchers)
            if patched:
                self._refuse(patched)
        reason = self._code.torch_reason(self._patchers) or self._hook_reason
        if reason is not None:
            self._refuse(reason)

    def _describe_weights(self, lines: list[str]) -> None:
        weights, dtypes = [], set()
        for slot in self.slots:
            weight = None if self.refusal_reason else slot.outline()
            if weight is None:
                continue
            if type(weight) not in (torch.Tensor, nn.Parameter):
                self._refuse(f"{slot.path} is stored as {type(weight).__name__}")
                continue
            slot.layout = layout_of(weight)
            weights.append(f"{slot.path} {tuple(weight.shape)} {weight.stride()} {weight.dtype}")
            dtypes.add(str(weight.dtype).removeprefix("torch."))
        self.entries: Mapping[str, str] = {
            "block": _qualname(type(self._block)),
            "hyper-parameters": _digest("\n".join(lines)),
            "weights": _digest("\n".join(weights)),
            "weight dtype": " ".join(sorted(dtypes)),
            "source": _digest(" ".join(_source_digest(name) for name in sorted(self._sources))),
        }

    def _describe_attributes(self, module: nn.Module) -> str:
        kept = {
            name: value
            for name, value in vars(module).items()
            if name not in _DERIVED
            and name not in self._transient
            and not is_ours(value)
            and not is_put_back(module, name)
            and (not name.startswith("_") or reads_attribute(type(module), name))
        }
        return _describe(kept, depth=0)

    def _judge(self, what: str, module: nn.Module, inner: bool) -> None:
        """Refuse a module that computes something else than its class says."""
        if inner and (module._forward_hooks or module._forward_pre_hooks):
            self._refuse(f"{what} has a hook or a replaced forward of another extension")
        for name in foreign_methods(module):
            if inner or name != "forward":
                self._refuse(
                    f"{what} has a hook or a replaced forward of another extension"
                    if name in ("forward", "_forward")
                    else f"{what} has a replaced {name} of another extension"
                )
        own = f"{type(module).__module__.partition('.')[0]}."
        for name, value in vars(module).items():
            if name in self._interfering and value:
                self._refuse(f"{what} has weights that change at each call ({name})")
            if name in _DERIVED or name in self._transient:
                continue
            if not reads_attribute(type(module), name):
                continue
            if isinstance(value, torch.Tensor):
                self._refuse(f"{what} holds a tensor that is no parameter ({name})")
            elif isinstance(value, types.FunctionType) and not _is_known_function(
                value, (own, *self._packages, *self._patchers)
            ):
                self._refuse(f"{what} holds a function of {home_of(value)} ({name})")

    def _refuse(self, reason: str) -> None:
        if self.refusal_reason is None:
            self.refusal_reason = reason

    def holds(self, moment: Hashable = None) -> bool:
        """Whether the block still is what it was: modules, hooks, attributes, code.

        Args:
            moment: As `PythonCode.look` takes it.
        """
        return (
            self._code.look(moment) == self._generation
            and surroundings_reason() == self._hook_reason
            and (not self._interfering or self._read_interfering() == self._interferes)
            and self._state.holds()
        )

    def _read_interfering(self) -> list[bool]:
        return interfering_in(self._modules, self._interfering)

    def weights(self, generation: int = 0) -> list[torch.Tensor] | None:
        """The weights as they are now, or None when their shape, dtype or layout changed.

        Args:
            generation: Of `TensorContents`.
        """
        found = []
        for slot in self.slots:
            weight = slot.read(generation)
            if weight is None or slot.layout != layout_of(weight):
                return None
            found.append(weight)
        return found

    def layouts(self) -> list[Layout]:
        """Of the weights as they were."""
        return [slot.layout for slot in self.slots if slot.layout is not None]

    def is_built_as(self, other: BlockTree) -> bool:
        """Whether the modules are the same ones, whatever their weights are stored as."""
        parts = ("block", "hyper-parameters", "source")
        return self.names == other.names and all(
            self.entries[part] == other.entries[part] for part in parts
        )

    def copy(self) -> nn.Module:
        """A structural copy without hooks, patches and wrappers that shares every tensor.

        Tracing the live block would race with other threads, which would meet
        fake tensors, and would run other extensions' hooks.
        """
        kept = [*self._block.parameters(), *self._block.buffers()]
        for module in self._block.modules():
            kept += [vars(module)[name] for name in self._transient & vars(module).keys()]
        block = copy.deepcopy(self._block, {id(value): value for value in kept}).eval()
        self._unwrap(block)
        for module in block.modules():
            for name in ("forward", "_forward", *self._transient):
                vars(module).pop(name, None)
            for hooks in ("_forward_hooks", "_forward_pre_hooks"):
                getattr(module, hooks).clear()
        return block

    def _unwrap(self, module: nn.Module) -> None:
        for name, child in list(module._modules.items()):
            if child is None:
                continue
            rule = next((r for r in self._rules if r.matches(child)), None)
            if rule is not None:
                child = rule.base(child)
                module._modules[name] = child
            self._unwrap(child)


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, nn.modules.batchnorm._NormBase)


def _is_known_function(function: types.FunctionType, packages: Sequence[str]) -> bool:
    """Whether a function's name says what it computes: none that closes over something."""
    home = f"{home_of(function)}."
    return function.__closure__ is None and home.startswith(("torch.", *packages))


def _qualname(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _source_digest(module_name: str) -> str:
    """Digest of a Python module's file; torch's own is covered by torch's version."""
    if module_name.startswith("torch."):
        return ""
    path = getattr(sys.modules.get(module_name), "__file__", None)
    return _digest(Path(path).read_text(encoding="utf-8")) if path else "none"


def _describe(value: object, depth: int) -> str:
    """Text that is equal for equal hyper-parameters, never an address."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "(" + ",".join(_describe(v, depth) for v in value) + ")"
    if isinstance(value, Mapping):
        parts = (f"{k}={_describe(v, depth)}" for k, v in sorted(value.items(), key=_by_name))
        return "{" + ",".join(parts) + "}"
    if isinstance(value, type):
        return _qualname(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if depth < 3 and hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        return _qualname(type(value)) + _describe(vars(value), depth + 1)
    return _qualname(type(value))


def _by_name(item: tuple[Any, Any]) -> str:
    return str(item[0])
