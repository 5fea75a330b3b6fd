"""The modules and weights of one block as they are now: identity, weights, a copy to trace."""

from __future__ import annotations

import copy
import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, str, torch.dtype)


Layout = tuple[torch.dtype, torch.Size, tuple[int, ...]]


def layout_of(weight: torch.Tensor) -> Layout:
    """What a graph takes for granted of a weight: dtype, shape and strides."""
    return weight.dtype, weight.shape, weight.stride()


class WrapperRule(ABC):
    """A module that stands around another one and changes its weight, as LoRA layers do."""

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Whether `module` is such a wrapper."""

    @abstractmethod
    def base(self, module: nn.Module) -> nn.Module:
        """The wrapped module, whose graph serves."""

    @abstractmethod
    def refusal(self, module: nn.Module) -> str | None:
        """Why this wrapper cannot be expressed as another weight, or None."""

    @abstractmethod
    def state(self, module: nn.Module) -> Hashable:
        """A value that differs whenever `effective` would return something else."""

    @abstractmethod
    def effective(self, module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
        """The weight with which the bare base computes what the wrapper computes."""


class _Slot:
    """One weight of a block, read anew at every call since hosts replace Parameters."""

    __slots__ = ("holder", "layout", "name", "path", "rule", "state", "value", "wrapper")

    def __init__(
        self, path: str, holder: dict[str, Any], name: str, rule: WrapperRule | None, wrapper: Any
    ) -> None:
        self.path, self.holder, self.name = path, holder, name
        self.rule, self.wrapper = rule, wrapper
        self.state: Hashable = None
        self.value: torch.Tensor | None = None
        self.layout: Layout | None = None  # None until it was described

    def read(self) -> torch.Tensor | None:
        weight = self.holder.get(self.name)
        if weight is None or self.rule is None:
            return weight
        state = self.rule.state(self.wrapper)
        if state != self.state or self.value is None:
            self.value = self.rule.effective(self.wrapper, weight)
            self.state = state
        return self.value


class BlockTree:
    """What a block consists of at one moment.

    Attributes:
        refusal: Why no graph may stand for this block, or None.
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
        transient: frozenset[str] = frozenset(),
        interfering: tuple[str, ...] = (),
        patchers: tuple[str, ...] = (),
    ) -> None:
        self.refusal: str | None = None
        self._parts, self._transient, self._interfering = parts, transient, interfering
        self._patchers = patchers
        self._packages = ("torch.nn.modules", *packages)
        self._block = block
        self.drops = any(_drops(module) for module in block.modules())
        self._rules = tuple(rules)
        self._children: list[tuple[dict[str, Any], str, Any]] = []
        self._modules: list[tuple[nn.Module, type, int, str | None]] = []
        self._processors: list[tuple[dict[str, Any], Any]] = []
        self._slots: list[_Slot] = []
        self._methods: dict[type, tuple[Any, ...]] = {}
        lines: list[str] = []
        self._sources: set[str] = set()
        self._visit("", block, lines, inner=False)
        self.names = tuple(slot.path for slot in self._slots)
        self._describe_weights(lines)

    def _visit(
        self,
        path: str,
        module: nn.Module,
        lines: list[str],
        *,
        inner: bool,
        wrapped: tuple[WrapperRule | None, Any] = (None, None),
    ) -> None:
        foreign = self._foreign(module, inner)
        self._modules.append((module, type(module), len(module._modules), foreign))
        if foreign:
            self._refuse(f"{path or 'the block'} {foreign}")
        if type(module) not in self._methods:
            self._methods[type(module)] = methods_of(type(module))
            patched = patched_class(type(module), self._patchers)
            if patched:
                self._refuse(patched)
        if not _qualname(type(module)).startswith(self._packages):
            self._refuse(f"{path or 'the block'} is a {type(module).__qualname__}, not known here")
        self._sources.add(type(module).__module__)
        lines.append(f"{path}: {_qualname(type(module))} {self._describe_attributes(module)}")
        processor = vars(module).get("processor")
        if processor is not None:
            self._processors.append((vars(module), processor))
        prefix = f"{path}." if path else ""
        rule, wrapper = wrapped
        for kind, holder in (("p", module._parameters), ("b", module._buffers)):
            for name, weight in holder.items():
                if weight is None:
                    continue
                merges = rule if kind == "p" and name == "weight" else None
                self._slots.append(_Slot(prefix + name, holder, name, merges, wrapper))
        for name, child in module._modules.items():
            self._children.append((module._modules, name, child))
            if child is None or not (inner or self._parts is None or name in self._parts):
                continue
            found = next((r for r in self._rules if r.matches(child)), None)
            if found is None:
                self._visit(prefix + name, child, lines, inner=True)
                continue
            reason = found.refusal(child)
            if reason is not None:
                self._refuse(f"{prefix}{name}: {reason}")
            base = found.base(child)
            foreign = self._foreign(child, True)
            self._modules.append((child, type(child), len(child._modules), foreign))
            if foreign:
                self._refuse(f"{prefix}{name} {foreign}")
            self._visit(prefix + name, base, lines, inner=True, wrapped=(found, child))

    def _describe_weights(self, lines: list[str]) -> None:
        weights, dtypes = [], set()
        for slot in self._slots:
            weight = None if self.refusal else slot.read()
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
            if name == "_chunk_size"
            or not (name.startswith("_") or name == "forward" or name in self._transient)
        }
        return _describe(kept, depth=0)

    def _foreign(self, module: nn.Module, inner: bool) -> str | None:
        """What makes a module compute something else than its class says, or None."""
        if _is_hooked(module) if inner else replaces(module, "_forward"):
            return "has a hook or a replaced forward of another extension"
        attributes = module.__dict__
        for name in self._interfering:
            if attributes.get(name):
                return f"has weights that change at each call ({name})"
        return None

    def _refuse(self, reason: str) -> None:
        if self.refusal is None:
            self.refusal = reason

    def holds(self) -> bool:
        """Whether the block still consists of the same modules, without hooks or wrappers added."""
        for holder, name, child in self._children:
            if holder.get(name) is not child:
                return False
        for module, cls, count, foreign in self._modules:
            if module.__class__ is not cls:
                return False
            attributes = module.__dict__
            if len(attributes["_modules"]) != count:
                return False
            if foreign is None and not (
                "forward" in attributes
                or "_forward" in attributes
                or attributes["_forward_hooks"]
                or attributes["_forward_pre_hooks"]
                or self._interfering
            ):
                continue  # by far most of them, at each call of each block
            if self._foreign(module, module is not self._block) != foreign:
                return False
        for cls, methods in self._methods.items():
            if methods_of(cls) != methods:
                return False
        return all(holder.get("processor") is processor for holder, processor in self._processors)

    def weights(self) -> list[torch.Tensor] | None:
        """The weights as they are now, or None when their shape, dtype or layout changed."""
        found = []
        for slot in self._slots:
            weight = slot.read()
            if weight is None or slot.layout != layout_of(weight):
                return None
            found.append(weight)
        return found

    def layouts(self) -> list[Layout]:
        """Of the weights as they were."""
        return [slot.layout for slot in self._slots if slot.layout is not None]

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


def methods_of(cls: type) -> tuple[Any, ...]:
    """What runs when a module of this class is called."""
    return getattr(cls, "forward", None), getattr(cls, "_forward", None)


def patched_class(cls: type, patchers: Sequence[str]) -> str | None:
    """Who has put another method into a class of modules, in plain words, or None.

    A graph knows nothing of a patch made after it was traced, and would hand a patch that was there
    then on to the next process.

    Args:
        cls: Of a block or a layer.
        patchers: Prefixes of the modules whose patches are known.
    """
    own = {base.__module__ for base in cls.__mro__}
    for method in methods_of(cls):
        source = getattr(method, "__module__", None)
        if source is not None and source not in own and not source.startswith(tuple(patchers)):
            return f"{cls.__qualname__} is patched by {source}"
    return None


def _is_hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or replaces(module, "forward")
        or replaces(module, "_forward")
    )


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, nn.modules.batchnorm._NormBase)


def replaces(module: nn.Module, name: str) -> bool:
    """Whether the instance has a method of its own, and not its class's put back by hand, as
    ControlNet for A1111 does when it is done."""
    method = module.__dict__.get(name)
    if method is None:
        return False
    return getattr(method, "__func__", None) is not getattr(type(module), name, None)


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
