"""Whether a model still is what it was: modules, code, places of weights, hooks, attributes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from onediff_ext.engine.blocks.weight_slots import WrapperRule
from onediff_ext.engine.validity.module_state import ModuleState, interfering_in
from onediff_ext.engine.validity.python_code import (
    PythonCode,
    foreign_class,
    foreign_methods,
    home_of,
    surroundings_reason,
)


@dataclass(frozen=True)
class TrustedModules:
    """What is known of the modules of a host's models.

    Args:
        sources: Prefixes of the full names of classes without side effects, besides torch's own.
        rules: Wrappers around layers, whose state is followed.
        patchers: As `BlockFamily.patchers`.
        transient: Names of attributes that decide nothing, as `BlockFamily.transient`.
        interfering: As `BlockFamily.interfering`.
        per_image: Full names of models whose images of one batch do not depend on each other, as
            `BlockFamily.per_image`.
        code: What is watched of the code of this process.
    """

    sources: Sequence[str] = ()
    rules: Sequence[WrapperRule] = ()
    trusted_patchers: Sequence[str] = ()
    ignored_attrs: frozenset[str] = frozenset()
    dynamic_weight_attrs: Sequence[str] = ()
    per_image: frozenset[str] = frozenset()
    code: PythonCode = field(default_factory=PythonCode)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """`sources` and what needs no naming."""
        return ("torch.nn.modules", "onediff_ext.", *self.sources)


def foreign_forward(model: nn.Module, forward: Any, known: TrustedModules) -> str | None:
    """Why a model's forward is not the one that its class has, or None.

    What another extension put in its place may do something else at each step, unseen by its
    arguments: ControlNet for A1111 has its own schedule there.

    Args:
        model: The host's module.
        forward: What runs as its forward, bound.
        known: Whose forwards may be captured.
    """
    if type(forward).__module__.startswith("onediff_ext."):
        return None
    function = getattr(forward, "__func__", None)
    own = function is not None and function is type(model).forward
    if own and f"{home_of(function)}.".startswith(known.prefixes):
        return None
    return f"another extension runs the {type(model).__qualname__} itself"


class Snapshot:
    """Everything of a model that a capture of its forward freezes, at one moment.

    A GPU is busy with the replay while this is looked at.
    Values of weights are not looked at: a capture reads them where they lie, so those
    written into the same storage (a merged LoRA, another checkpoint) are seen.

    Args:
        model: The host's module.
        known: What its modules may be.

    Attributes:
        refusal_reason: Why no capture of this model would be safe, or None.
        is_per_image: Whether the images of a batch do not depend on each other.
    """

    def __init__(self, model: nn.Module, known: TrustedModules) -> None:
        modules = list(model.modules())
        processors = [vars(m).get("processor") for m in modules]
        classes = {type(m) for m in modules} | {type(p) for p in processors if p is not None}
        wrappers = [m for m in modules if any(rule.matches(m) for rule in known.rules)]
        wrapped = {id(inner) for m in wrappers for inner in m.modules()}
        bare = [m for m in modules if id(m) in wrapped]
        self._code, self._hook_reason = known.code, surroundings_reason()
        self._code.watch(classes)
        self._generation = self._code.look()
        self._state = ModuleState(
            modules, model, ignored=known.ignored_attrs, parameters=True, bare=bare
        )
        self._modules, self._interfering = modules, tuple(known.dynamic_weight_attrs)
        self._interferes = interfering_in(modules, self._interfering)
        self._tensors = [*model.parameters(), *model.buffers()]
        self._places = self._where()
        self.refusal_reason = (
            next(filter(None, (_refusal(m, model, known, id(m) in wrapped) for m in modules)), None)
            or next(filter(None, (_processor_refusal(p, known) for p in processors)), None)
            or next(
                filter(None, (foreign_class(cls, known.trusted_patchers) for cls in classes)), None
            )
            or self._code.torch_reason(known.trusted_patchers)
            or self._hook_reason
            or ("a layer changes its weights at each call" if any(self._interferes) else None)
        )
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        # Processors of pipelines attend from one image of a batch to another (text to video).
        self.is_per_image = name in known.per_image and not any(
            ".pipelines." in f"{type(p).__module__}." for p in processors if p is not None
        )

    def weights_lie_where_they_did(self) -> bool:
        """Whether a recording that reads the weights may be launched: they are kept alive here,
        also those that the model has lost, but some may have moved or been given up."""
        return self._where() == self._places

    def holds(self, moment: Hashable = None) -> bool:
        """Whether nothing has changed.

        Args:
            moment: As `PythonCode.look` takes it.
        """
        return (
            self._code.look(moment) == self._generation
            and surroundings_reason() == self._hook_reason
            and self._where() == self._places
            and self._state.holds()
            and (
                not self._interfering
                or interfering_in(self._modules, self._interfering) == self._interferes
            )
        )

    def places(self) -> set[int]:
        """Addresses of the storages of the weights."""
        return {tensor.untyped_storage().data_ptr() for tensor in self._tensors}

    def _where(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]


def _refusal(
    module: nn.Module, model: nn.Module, known: TrustedModules, wrapped: bool
) -> str | None:
    cls = type(module)
    if not wrapped and not f"{cls.__module__}.{cls.__qualname__}".startswith(known.prefixes):
        return f"{cls.__qualname__} is not known as free of side effects"
    if module is model:
        # Its own hooks run around the capture; its forward is `foreign_forward`'s to judge.
        replaced = [name for name in foreign_methods(module) if name != "forward"]
    elif module._forward_hooks or module._forward_pre_hooks:
        return f"a {cls.__qualname__} has a hook of another extension"
    else:
        replaced = list(foreign_methods(module))
    if replaced:
        return f"a {cls.__qualname__} has the {replaced[0]} of another extension"
    return None


def _processor_refusal(processor: object, known: TrustedModules) -> str | None:
    if processor is None or isinstance(processor, nn.Module):
        return None
    cls = type(processor)
    if f"{cls.__module__}.{cls.__qualname__}".startswith(known.prefixes):
        return None
    return f"{cls.__qualname__} is not known as free of side effects"
