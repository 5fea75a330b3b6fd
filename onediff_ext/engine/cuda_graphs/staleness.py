"""Whether a CUDA graph is stale: its model's modules, code, weight addresses, hooks, attributes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.weight_form import layout_of
from onediff_ext.engine.blocks.weight_functions import (
    FrozenFunctions,
    known_attributes,
)
from onediff_ext.engine.blocks.weight_slots import rule_of
from onediff_ext.engine.class_methods import ClassForward
from onediff_ext.engine.cuda_graphs.trusted_modules import TrustedModules
from onediff_ext.engine.torch_compile import TORCH_COMPILES, is_compiled
from onediff_ext.engine.validity.foreign_code import defining_module, replaced_methods
from onediff_ext.engine.validity.helper_functions import reads_attribute
from onediff_ext.engine.validity.left_children import LeftOvers
from onediff_ext.engine.validity.left_wrappers import left_wrappers
from onediff_ext.engine.validity.model_state import ModelState, attention_processors
from onediff_ext.engine.validity.once_per_image import OncePerImage
from onediff_ext.engine.weak_tensors import WeakTensors, is_made_of_others, parts_of

# Packages with quantized tensors, whose operators have no state.
_TENSOR_SOURCES = ("torchao.", "bitsandbytes.")
DYNAMIC_WEIGHTS = "a layer changes its weights at each call"


def foreign_forward(model: nn.Module, forward: Any, known: TrustedModules) -> str | None:
    """Why a model's forward belongs to another extension, or None.

    Such a forward may do something else at each step without having it as an argument: a
    ControlNet extension may follow its own schedule there.

    Args:
        model: The host's module.
        forward: What runs as its forward, from `forward_of`.
        known: The modules whose forwards may be recorded.

    Returns:
        None if the forward is that of the model's class, or of this package.
    """
    if isinstance(forward, ClassForward):
        forward = forward.bound
    if type(forward).__module__.startswith("onediff_ext."):
        return None
    function = getattr(forward, "__func__", None)
    own = function is not None and function is type(model).forward
    if own and f"{defining_module(function)}.".startswith(known.prefixes):
        return None
    return f"another extension runs the {type(model).__qualname__} itself"


class Snapshot:
    """Everything of a model that a CUDA graph of its forward freezes, at one moment.

    A CUDA graph is stale when its model's `ModelState`, or the addresses or layouts of its weights
    have changed. Values of weights do not count: a CUDA graph reads weights at their addresses, so
    values written into the same storage (a merged LoRA, another checkpoint) take effect. `holds`
    runs while the GPU is busy with the replay.

    Args:
        model: The host's module.
        known: The host's modules that are known.
        merged: Ids of the wrappers whose weights are merged for a block's graph: what they decide
            is followed there. Other wrappers run in Python while a CUDA graph is recorded.

    Attributes:
        merged: As given.
        refusal_reason: Why no CUDA graph of this model would be safe, or None.
        has_weight_functions: Whether layers apply functions to their weights at each call.
        is_per_image: Whether the images of a batch do not depend on each other.
        devices: Where the weights are.
        origin: The same for snapshots that differ only in where the weights lie.
    """

    devices: frozenset[torch.device]

    def __init__(
        self, model: nn.Module, known: TrustedModules, merged: frozenset[int] = frozenset()
    ) -> None:
        self.merged = merged
        self._known, self._settings = known, known.current_settings()
        modules = list(model.modules())
        processors = attention_processors(modules)
        wrappers = [(r, m) for m in modules if (r := rule_of(m, known.rules)) is not None]
        wrapped = {id(inner): _package(m) for _, m in wrappers for inner in m.modules()}
        left_overs = LeftOvers(
            model, processors, lambda m: id(m) in wrapped or _is_known(m, known.prefixes)
        )
        modules = [module for module in modules if id(module) not in left_overs.modules]
        left = [(m, *found) for m in modules for found in left_wrappers(m).items()]
        passing = {(id(m), name) for m, name, wrapper in left if wrapper.passes()}
        self._functions = FrozenFunctions(modules, known.weight_functions)
        self._state = ModelState(
            modules,
            model,
            known.code,
            ignored_attrs=known.ignored_attrs,
            dynamic_weight_attrs=known.dynamic_weight_attrs,
            bare=[m for rule, w in wrappers if id(w) in merged for m in rule.around(w)],
            parameters=True,
            left=[wrapper for _, _, wrapper in left],
            called=self._functions.classes,
        )
        weights = [*model.parameters(), *model.buffers()]
        tensors = [*parts_of(weights), *self._functions.tensors()]  # of a LoRA, for one
        self._tensors = WeakTensors(tensors)
        self._layouts = list(map(_form_of, tensors))
        self._note_places(tensors)
        self.origin = object()
        self.has_weight_functions = self._state.has_dynamic_weights
        self._layout = OncePerImage()
        self.refusal_reason = (
            next(
                filter(None, (_refusal_reason(m, model, known, wrapped, passing) for m in modules)),
                None,
            )
            or next(filter(None, (_processor_reason(p, known) for p in processors)), None)
            or next(filter(None, (_tensor_reason(t, known) for t in weights)), None)
            or self._state.foreign_code_reason(known.trusted_patchers)
            or (DYNAMIC_WEIGHTS if self._has_unknown_functions(modules) else None)
        )
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        # Processors of pipelines attend from one image of a batch to another (text to video).
        self.is_per_image = name in known.per_image and not any(
            ".pipelines." in f"{type(p).__module__}." for p in processors
        )

    def weights_lie_where_they_did(self) -> bool:
        """Return whether a recording that reads the weights may be launched.

        Some may have moved or been freed: the snapshot does not keep them alive.
        """
        tensors = self._tensors.alive()
        return tensors is not None and _where(tensors) == self._places

    def at_new_places(self) -> Snapshot | None:
        """Return this snapshot with its weights where they lie now; None if more has changed.

        A host that moves a model out of the GPU's memory and back changes nothing else.
        """
        tensors = self._tensors.alive()
        if (
            tensors is None
            or self._known.current_settings() != self._settings
            or not self._functions.hold()
            or not self._has_its_layouts(tensors, None)
            or not self._state.holds()
        ):
            return None
        moved = copy.copy(self)
        moved._note_places(tensors)
        return moved

    def holds(self, epoch: Hashable = None) -> bool:
        """Return whether nothing has changed.

        Args:
            epoch: Equal for the calls of one image; layouts of weights and code objects are read
                once for them. None reads them each time.
        """
        return self._weights_and_settings_hold(epoch) and self._state.holds(epoch=epoch)

    def holds_but_for_code(self) -> bool:
        """Return whether at most the code has changed that the modules run."""
        return self._weights_and_settings_hold(None) and self._state.holds_but_for_code()

    def _weights_and_settings_hold(self, epoch: Hashable) -> bool:
        tensors = self._tensors.alive()
        return (
            tensors is not None
            and _where(tensors) == self._places
            and self._known.current_settings() == self._settings
            and self._functions.hold()
            and self._has_its_layouts(tensors, epoch)
        )

    def streamed_storages(self, device: torch.device) -> frozenset[int] | None:
        """Return which weights are in main memory while the model runs on a GPU.

        Args:
            device: Of the model's inputs.

        Returns:
            Addresses of their storages; None if a recording on this device could not copy them.
        """
        if self.devices == {device}:
            return frozenset()
        tensors = self._tensors.alive()
        if tensors is None:
            return None
        elsewhere = [tensor for tensor in tensors if tensor.device != device]
        may_copy = self._known.stays_pinned
        if all(t.is_cpu and any(stays(t) for stays in may_copy) for t in elsewhere):
            return frozenset(map(_storage_of, elsewhere))
        return None

    def _has_unknown_functions(self, modules: Sequence[nn.Module]) -> bool:
        """Whether a layer changes its weights at each call, and not by functions alone that a CUDA
        graph may contain."""
        if not self._state.has_dynamic_weights:
            return False
        rules = self._known.weight_functions
        return not self._functions.is_known or any(
            vars(module).get(name) and name not in known_attributes(module, rules)
            for module in modules
            for name in self._known.dynamic_weight_attrs
        )

    def places(self) -> set[int]:
        """Addresses of the storages of the weights."""
        return self._storages

    def _note_places(self, tensors: list[torch.Tensor]) -> None:
        self._places = _where(tensors)
        self._storages = set(map(_storage_of, tensors))
        self.devices = frozenset(tensor.device for tensor in tensors)

    def _has_its_layouts(self, tensors: list[torch.Tensor], epoch: Hashable) -> bool:
        """Whether weights lie as they did at their addresses: ``weight.data = weight.data.t()``."""
        return self._layout.holds(epoch, lambda: list(map(_form_of, tensors)) == self._layouts)


def _where(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage, without a Python object for it."""
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


def _refusal_reason(
    module: nn.Module,
    model: nn.Module,
    known: TrustedModules,
    wrapped: Mapping[int, str],
    passing: Collection[tuple[int, str]],
) -> str | None:
    """Say why a module must not be recorded, or None.

    Args:
        module: A module of the model.
        model: The host's module.
        known: The host's modules that are known.
        wrapped: By ids of the modules inside of known wrappers, the wrapper's package.
        passing: Id of a module and name of its method, where a left wrapper passes calls through.
    """
    cls = type(module)
    prefixes = known.prefixes
    if id(module) in wrapped:
        prefixes += (wrapped[id(module)],)
    if not _is_known(module, prefixes):
        return f"{cls.__qualname__} is not known as free of side effects"
    name = _foreign_function(module, (*prefixes, *known.trusted_patchers), known.ignored_attrs)
    if name is not None:
        return f"a {cls.__qualname__} has a function of another extension ({name})"
    if module is model:
        # Its own hooks run around the capture; its forward is `foreign_forward`'s to judge.
        replaced = [name for name in replaced_methods(module) if name != "forward"]
    elif is_compiled(module):
        return f"{cls.__qualname__}: {TORCH_COMPILES}"
    elif module._forward_hooks or module._forward_pre_hooks:
        return f"a {cls.__qualname__} has a hook of another extension"
    else:
        replaced = [m for m in replaced_methods(module) if (id(module), m) not in passing]
    if replaced:
        return f"a {cls.__qualname__} has the {replaced[0]} of {known.patcher_of(module)}"
    return None


def _is_known(module: nn.Module, prefixes: tuple[str, ...]) -> bool:
    return f"{type(module).__module__}.{type(module).__qualname__}".startswith(prefixes)


def _form_of(tensor: torch.Tensor) -> Hashable:
    return type(tensor), layout_of(tensor)


def _tensor_reason(tensor: torch.Tensor, known: TrustedModules) -> str | None:
    """Refuse weights that wrap others or have Python code of their own, unless that is known."""
    cls = type(tensor)
    if is_made_of_others(tensor):  # its operators are Python code, and nobody sees what they read
        return f"a weight is stored as {cls.__qualname__}, which wraps other tensors"
    if f"{cls.__module__}.".startswith(("torch.", *_TENSOR_SOURCES, *known.prefixes)):
        return None
    return f"a weight is stored as {cls.__qualname__}, not known as free of side effects"


def _package(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0] + "."


def _foreign_function(
    module: nn.Module, prefixes: tuple[str, ...], ignored: Collection[str]
) -> str | None:
    """Name an attribute that holds a function, or an object to call, of another extension.

    It may keep state. Replaced methods are left to `replaced_methods`.
    """
    cls = type(module)
    for name, value in vars(module).items():
        if (
            callable(value)
            and not isinstance(value, (nn.Module, type))
            and name != "processor"  # `_processor_reason` knows these
            and name not in ignored
            and not hasattr(cls, name)
            and reads_attribute(cls, name)
            and not f"{defining_module(value) or 'torch'}.".startswith(("torch.", *prefixes))
        ):
            return name
    return None


def _processor_reason(processor: object, known: TrustedModules) -> str | None:
    if processor is None or isinstance(processor, nn.Module):
        return None
    cls = type(processor)
    # Those of pipelines keep attention maps and counts between calls.
    of_pipeline = ".pipelines." in f"{cls.__module__}."
    if f"{cls.__module__}.{cls.__qualname__}".startswith(known.prefixes) and not of_pipeline:
        return known.processor_reason(processor)
    return f"{cls.__qualname__} is not known as free of side effects"
