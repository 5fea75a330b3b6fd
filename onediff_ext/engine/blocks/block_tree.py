"""A block's modules and weights: what its key says, why it has no graph, a copy to trace."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.family import BlockFamily
from onediff_ext.engine.blocks.key_text import (
    describe,
    digest,
    follows_from_padding,
    is_untold_function,
    qualified_name,
    source_digest,
)
from onediff_ext.engine.blocks.weight_form import Layout, is_plain, layout_of
from onediff_ext.engine.blocks.weight_functions import (
    WeightFunctionRule,
    functions_of,
    known_attributes,
)
from onediff_ext.engine.blocks.weight_slots import WeightSlot, WrapperRule, rule_of
from onediff_ext.engine.validity.foreign_code import (
    defining_module,
    is_ours,
    is_own_method,
    replaced_methods,
)
from onediff_ext.engine.validity.helper_functions import reads_attribute
from onediff_ext.engine.validity.left_children import LeftOvers
from onediff_ext.engine.validity.left_wrappers import LeftWrapper, left_wrappers
from onediff_ext.engine.validity.model_state import ModelState, attention_processors
from onediff_ext.engine.validity.module_attributes import INTERNAL
from onediff_ext.engine.validity.python_code import PythonCode

_NOT_IN_KEY = INTERNAL | {"forward"}


class BlockTree:
    """The modules and weights of a block at one moment.

    Args:
        block: The host's module.
        packages: Prefixes of the full names of the classes that the block may consist of, besides
            torch's.
        rules: Wrappers around layers that weights can express.
        parts: Names of the children that count; None for all.
        ignored_attrs: As `BlockFamily.ignored_attrs`.
        dynamic_weight_attrs: As `BlockFamily.dynamic_weight_attrs`.
        trusted_patchers: As `BlockFamily.trusted_patchers`.
        redundant_attrs: As `BlockFamily.redundant_attrs`.
        weight_functions: As `BlockFamily.weight_functions`.
        code: Watches the code of this process.
        moment, epoch: As for `PythonCode.current_generation`.

    Attributes:
        refusal_reason: Why no graph may replace this block, or None.
        changing: A module, and its attribute that changes its weights at each call.
        entries: The part of the kind's key that the block decides.
        slots: The weights, in the order of `weights`.
        names: Full names of the weights, in the order of `weights`.
        has_weight_functions: Whether a layer applied functions to its weights then.
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
        redundant_attrs: frozenset[str] = frozenset(),
        weight_functions: tuple[WeightFunctionRule, ...] = (),
        code: PythonCode | None = None,
        moment: Hashable = None,
        epoch: Hashable = None,
    ) -> None:
        self.refusal_reason: str | None = None
        self.changing: tuple[nn.Module, str] | None = None
        self._parts, self._ignored_attrs = parts, ignored_attrs
        self._dynamic_weight_attrs, self._trusted_patchers = dynamic_weight_attrs, trusted_patchers
        self._function_rules = weight_functions
        self._not_in_key = _NOT_IN_KEY | ignored_attrs | redundant_attrs
        self._packages = ("torch.nn.modules", *packages)
        self._block = block
        self._dropouts = [module for module in block.modules() if _depends_on_training(module)]
        self._rules = tuple(rules)
        self._modules: list[nn.Module] = []
        self._wrappers: list[nn.Module] = []
        self._refusing: list[tuple[WrapperRule, nn.Module, str]] = []
        self._left: list[LeftWrapper] = []
        self._left_overs = LeftOvers(block, attention_processors(block.modules()), self._is_known)
        self.slots: list[WeightSlot] = []
        self._absent: list[tuple[dict[str, Any], str]] = []  # such as the bias of a layer without
        lines: list[str] = []
        self._sources: set[str] = set()
        self._visit("", block, lines, inner=False)
        self.names = tuple(slot.path for slot in self.slots)
        self.has_weight_functions = any(slot.functions is not None for slot in self.slots)
        self._state = ModelState(
            self._modules,
            block,
            PythonCode() if code is None else code,
            ignored_attrs=ignored_attrs,
            dynamic_weight_attrs=dynamic_weight_attrs,
            bare=self._wrappers,
            left=self._left,
            moment=moment,
            epoch=epoch,
        )
        reason = self._state.foreign_code_reason(trusted_patchers)
        if reason is not None:
            self._refuse(reason)
        self._describe_weights(lines)

    @classmethod
    def of(
        cls,
        block: nn.Module,
        family: BlockFamily,
        rules: Sequence[WrapperRule] = (),
        code: PythonCode | None = None,
        moment: Hashable = None,
        epoch: Hashable = None,
    ) -> BlockTree:
        """Return the tree of a block of this family, as the block is now.

        Args:
            block: The host's module.
            family: The family of the block's class.
            rules: Wrappers around layers that weights can express.
            code: Watches the code of this process.
            moment, epoch: As for `PythonCode.current_generation`.
        """
        return cls(
            block,
            family.sources,
            rules,
            family.parts,
            family.ignored_attrs,
            family.dynamic_weight_attrs,
            family.trusted_patchers,
            family.redundant_attrs,
            family.weight_functions,
            code,
            moment,
            epoch,
        )

    def holds(self, moment: Hashable = None, epoch: Hashable = None) -> bool:
        """Return whether the block is what it was: modules, hooks, attributes, code.

        What a wrapper decides is part of the weights (`WrapperRule.state`). A wrapper that refuses
        the block is asked again.

        Args:
            moment, epoch: As for `PythonCode.current_generation`.
        """
        return (
            self._state.holds(moment, epoch)
            and all(holder.get(name) is None for holder, name in self._absent)
            and all(rule.refusal_reason(w) == reason for rule, w, reason in self._refusing)
            and (self.changing is None or not self._is_known_now(*self.changing))
        )

    @property
    def is_training(self) -> bool:
        """Whether a layer computes something else than in inference, being in training mode.

        A dropout with probability 0 does not: some hosts leave a UNet in training mode with such
        layers.
        """
        return any(module.training for module in self._dropouts)

    @property
    def has_left_wrappers(self) -> bool:
        """Whether an extension left wrappers on methods, which pass calls through."""
        return bool(self._left)

    def weights(self, generation: int = 0) -> list[torch.Tensor] | None:
        """Return the weights as they are now.

        Args:
            generation: From `TensorContents.current_generation`.

        Returns:
            One tensor for each of `names`; None when a shape, dtype or layout has changed.
        """
        found = []
        for slot in self.slots:
            weight = slot.read(generation)
            if weight is None or slot.layout != layout_of(weight) or not is_plain(weight):
                return None
            found.append(weight)
        return found

    def layouts(self) -> list[Layout]:
        """Return the dtype, shape and strides of each weight when the tree was made."""
        return [slot.layout for slot in self.slots if slot.layout is not None]

    def is_built_as(self, names: tuple[str, ...], entries: Mapping[str, str]) -> bool:
        """Return whether the modules are the same, whatever dtype the weights have.

        Args:
            names, entries: Those of another tree.
        """
        parts = ("block", "hyper-parameters", "source")
        return self.names == names and all(self.entries[part] == entries[part] for part in parts)

    def copy(self) -> nn.Module:
        """Return a structural copy that shares every tensor, without what others have added.

        Tracing the live block would race with other threads, which would meet
        fake tensors, and would run other extensions' hooks.
        """
        shared: dict[int, Any] = {}  # by id: not copied
        for value in (*self._block.parameters(), *self._block.buffers()):
            shared[id(value)] = value
        for module in self._block.modules():
            for name, value in vars(module).items():
                if self._is_foreign_note(module, name) and not isinstance(value, nn.Module):
                    shared[id(value)] = value
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                shared[id(hooks)] = type(hooks)()
        left = nn.Identity()
        shared.update(dict.fromkeys(self._left_overs.modules, left))
        block = copy.deepcopy(self._block, shared).eval()
        for module in block.modules():
            for name in [name for name, child in module._modules.items() if child is left]:
                del module._modules[name]
        self._unwrap(block)
        for module in block.modules():
            for name in ("forward", "_forward", *self._ignored_attrs):
                vars(module).pop(name, None)
        return block

    def _is_foreign_note(self, module: nn.Module, name: str) -> bool:
        """Whether no code of a module's class reads an attribute.

        Others keep much behind one: diffusers' hooks of step caches hold the whole model.
        """
        if name in ("forward", "_forward") or name in self._ignored_attrs:
            return True
        return name not in INTERNAL and not reads_attribute(type(module), name)

    def _visit(
        self,
        path: str,
        module: nn.Module,
        lines: list[str],
        *,
        inner: bool,
        wrapped: tuple[WrapperRule, nn.Module] | None = None,
    ) -> None:
        """Add a module, its weights and its children to the tree, and a line to the key's text."""
        self._modules.append(module)
        self._judge(path or "the block", module, inner)
        name = qualified_name(type(module))
        if not name.startswith(self._packages):
            self._refuse(f"{path or 'the block'} is a {type(module).__qualname__}, not known here")
        self._sources.add(type(module).__module__)
        lines.append(f"{path}: {name} {self._describe_attributes(module)}")
        prefix = f"{path}." if path else ""
        functions = functions_of(module, self._function_rules)
        for holder, merges in ((module._parameters, True), (module._buffers, False)):
            for name, weight in holder.items():
                if weight is not None:
                    by = wrapped if merges and name == "weight" else None
                    applied = functions.get(name) if merges else None
                    self.slots.append(WeightSlot(prefix + name, holder, name, by, applied))
                else:
                    self._absent.append((holder, name))
        for name, child in module._modules.items():
            if child is None or id(child) in self._left_overs.modules:
                continue
            if not (inner or self._parts is None or name in self._parts):
                continue
            rule = rule_of(child, self._rules)
            if rule is None:
                self._visit(prefix + name, child, lines, inner=True)
                continue
            reason = rule.refusal_reason(child)
            if reason is not None:
                self._refusing.append((rule, child, reason))
                self._refuse(f"{prefix}{name}: {reason}")
            around = rule.around(child)
            self._modules += around
            self._wrappers += around
            for wrapper in around:
                self._judge(f"{prefix}{name}", wrapper, True)
            self._visit(prefix + name, rule.base(child), lines, inner=True, wrapped=(rule, child))

    def _describe_weights(self, lines: list[str]) -> None:
        weights, dtypes = [], set()
        for slot in self.slots:
            if self.refusal_reason or (weight := slot.unmerged()) is None:
                continue
            if not is_plain(weight):
                self._refuse(f"{slot.path} is stored as {type(weight).__name__}")
                continue
            slot.layout = layout_of(weight)
            weights.append(f"{slot.path} {tuple(weight.shape)} {weight.stride()} {weight.dtype}")
            dtypes.add(str(weight.dtype).removeprefix("torch."))
        self.entries: Mapping[str, str] = {
            "block": qualified_name(type(self._block)),
            "hyper-parameters": digest("\n".join(lines)),
            "weights": digest("\n".join(weights)),
            "weight dtype": " ".join(sorted(dtypes)),
            "source": digest(" ".join(source_digest(name) for name in sorted(self._sources))),
        }

    def _describe_attributes(self, module: nn.Module) -> str:
        untold: list[str] = []
        told = ",".join(
            f"{name}={describe(value, untold=untold)}"
            for name, value in sorted(vars(module).items(), key=itemgetter(0))
            if name not in self._not_in_key
            and not (is_ours(value) or follows_from_padding(module, name))
            and not is_own_method(module, name)
            and (not name.startswith("_") or reads_attribute(type(module), name))
            and not self._left_overs.has_attribute(module, name)
        )
        if untold:
            self._refuse(f"a {type(module).__qualname__} holds a {untold[0]} of unknown value")
        return f"{{{told}}}"

    def _is_known_now(self, module: nn.Module, attribute: str) -> bool:
        return attribute in known_attributes(module, self._function_rules)

    def _is_known(self, module: nn.Module) -> bool:
        is_known = qualified_name(type(module)).startswith(self._packages)
        return is_known or rule_of(module, self._rules) is not None

    def _judge(self, what: str, module: nn.Module, inner: bool) -> None:
        """Refuse a module that does not compute what its class says."""
        if inner and (module._forward_hooks or module._forward_pre_hooks):
            self._refuse(f"{what} has a hook or a replaced forward of another extension")
        replaced = replaced_methods(module)
        left = left_wrappers(module, replaced)
        self._left += left.values()
        for name in replaced:
            if name in left and left[name].passes():
                continue
            if inner or name != "forward":
                self._refuse(
                    f"{what} has a hook or a replaced forward of another extension"
                    if name in ("forward", "_forward")
                    else f"{what} has a replaced {name} of another extension"
                )
        own = f"{type(module).__module__.partition('.')[0]}."
        known = known_attributes(module, self._function_rules)
        for name, value in vars(module).items():
            if name in self._dynamic_weight_attrs and value and name not in known:
                self.changing = self.changing or (module, name)
                self._refuse(f"{what} has weights that change at each call ({name})")
            if name in self._not_in_key or not reads_attribute(type(module), name):
                continue
            if isinstance(value, torch.Tensor):
                self._refuse(f"{what} holds a tensor that is no parameter ({name})")
            elif is_untold_function(
                value, module, name, (own, *self._packages, *self._trusted_patchers)
            ):
                source = defining_module(value) or f"a {type(value).__qualname__}"
                self._refuse(f"{what} holds a function of {source} ({name})")

    def _refuse(self, reason: str) -> None:
        """Keep the first reason."""
        if self.refusal_reason is None:
            self.refusal_reason = reason

    def _unwrap(self, module: nn.Module) -> None:
        """Put the wrapped layers back in place of their wrappers, in a copy."""
        for name, child in list(module._modules.items()):
            if child is None:
                continue
            rule = rule_of(child, self._rules)
            if rule is not None:
                child = rule.base(child)
                module._modules[name] = child
            self._unwrap(child)


def _depends_on_training(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, nn.modules.batchnorm._NormBase)
