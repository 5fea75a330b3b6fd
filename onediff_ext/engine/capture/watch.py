"""Whether a model still is what it was: its modules, weights, hooks and attributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from onediff_ext.engine.attributes import same_objects
from onediff_ext.engine.structure import WrapperRule, methods_of, patched_class, replaces


@dataclass(frozen=True)
class Known:
    """What is known of the modules of a host's models.

    Args:
        sources: Prefixes of the full names of classes without side effects, besides torch's own.
        rules: Wrappers around layers, whose `state` counts.
        patchers: As `BlockFamily.patchers`.
        transient: Names of attributes that decide nothing, as `BlockFamily.transient`.
    """

    sources: Sequence[str] = ()
    rules: Sequence[WrapperRule] = ()
    patchers: Sequence[str] = ()
    transient: frozenset[str] = frozenset()

    @property
    def prefixes(self) -> tuple[str, ...]:
        """`sources` and what needs no naming."""
        return ("torch.nn.modules", "onediff_ext.", *self.sources)


def foreign_forward(model: nn.Module, forward: Any, known: Known) -> str | None:
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
    if own and f"{function.__module__}.".startswith(known.prefixes):
        return None
    return f"another extension runs the {type(model).__qualname__} itself"


class ModelWatch:
    """Everything of a model that a capture of its forward freezes.

    A look at SDXL's UNet takes three milliseconds, during which a GPU is busy with the replay.
    Values of weights are not looked at: a capture reads them where they lie, so those
    written into the same storage (a merged LoRA, another checkpoint) are seen.

    Args:
        model: The host's module.
        known: What its modules may be.

    Attributes:
        refusal: Why no capture of this model would be safe, or None.
    """

    def __init__(self, model: nn.Module, known: Known) -> None:
        self._transient = known.transient
        self._modules = list(model.modules())
        self._classes = list(dict.fromkeys(map(type, self._modules)))
        self._wrappers = [(r, m) for m in self._modules for r in known.rules if r.matches(m)]
        wrapped = {id(inner) for _, m in self._wrappers for inner in m.modules()}
        self.refusal = next(
            (
                reason
                for module in self._modules
                if (reason := _refusal(module, model, known.prefixes, id(module) in wrapped))
            ),
            None,
        ) or next(filter(None, (patched_class(cls, known.patchers) for cls in self._classes)), None)
        own = [m for m in self._modules if not type(m).__module__.startswith("torch.nn.modules")]
        self._leaves = [vars(m) for m in self._modules]
        self._dicts: list[dict[str, Any]] = [vars(m) for m in own]
        for module in self._modules:
            self._dicts += [module._parameters, module._buffers, module._modules]
            self._dicts += [module._forward_hooks, module._forward_pre_hooks]  # type: ignore[list-item]
        # An attention processor is no module, and its attributes (a scale) decide what it does.
        processors = [vars(m).get("processor") for m in own]
        self._dicts += [vars(p) for p in processors if hasattr(p, "__dict__")]
        self._tensors = [*model.parameters(), *model.buffers()]

    def places(self) -> list[int]:
        """Where the weights lie. They are kept alive here, also those that the model has lost."""
        return [tensor.data_ptr() for tensor in self._tensors]

    def look(self) -> Snapshot:
        """What is there now."""
        values = list(chain.from_iterable(map(dict.values, self._dicts)))
        return Snapshot(
            list(chain.from_iterable(self._dicts)),
            values,
            self._transient,
            self.places(),
            (
                list(map(type, self._modules)),
                [attributes.get("forward") for attributes in self._leaves],
                [methods_of(cls) for cls in self._classes],
                [rule.state(module) for rule, module in self._wrappers],
            ),
        )


class Snapshot:
    """What a `ModelWatch` saw. It keeps the objects alive, so that none can return as another.

    Attributes:
        places: Addresses of the weights.
    """

    def __init__(
        self,
        names: list[str],
        values: list[Any],
        transient: frozenset[str],
        places: list[int],
        rest: tuple[list[Any], ...],
    ) -> None:
        self._names, self._values = names, values
        self._transient, self.places, self._rest = transient, places, rest

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Snapshot)
            and self.places == other.places
            and self._rest == other._rest
            and (same_objects(self._values, other._values) or self._says_the_same(other))
        )

    def _says_the_same(self, other: Snapshot) -> bool:
        """Whether all that decides anything is what it was: A1111 names each layer anew with every
        checkpoint, in other strings of the same letters, and notes what it has merged into it."""
        ours, theirs = self._deciding(), other._deciding()
        return len(ours) == len(theirs) and all(
            value is other or (type(value) is str and value == other)
            for value, other in zip(ours, theirs, strict=True)
        )

    def _deciding(self) -> list[Any]:
        named = zip(self._names, self._values, strict=True)
        return [value for name, value in named if name not in self._transient]

    __hash__ = None  # type: ignore[assignment]


def _refusal(
    module: nn.Module, model: nn.Module, known: tuple[str, ...], wrapped: bool
) -> str | None:
    cls = type(module)
    if not wrapped and not f"{cls.__module__}.{cls.__qualname__}".startswith(known):
        return f"{cls.__qualname__} is not known as free of side effects"
    if module is model:
        # Its own hooks run around the capture; its forward is `foreign_forward`'s to judge.
        return None
    if module._forward_hooks or module._forward_pre_hooks:
        return f"a {cls.__qualname__} has a hook of another extension"
    forward = vars(module).get("forward")
    if replaces(module, "forward") and not getattr(forward, "capturable", False):
        return f"a {cls.__qualname__} has the forward of another extension"
    return None
