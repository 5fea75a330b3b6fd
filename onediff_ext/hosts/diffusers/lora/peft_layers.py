"""peft's LoRA layers as a changed weight of the layer that they wrap."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.weight_slots import WrapperRule
from onediff_ext.engine.validity.tensor_contents import content_of

_KINDS = ("lora_A", "lora_B", "lora_dropout")
_PLAIN = (nn.Linear, nn.Conv2d)


class PeftLoraRule(WrapperRule):
    """peft's LoRA around a Linear or Conv2d: base weight + Σ scale · B·A.

    So a loaded, unfused LoRA runs through the graph of the bare layer without a rebuild. After it
    is unloaded, the original weights run again.
    """

    def matches(self, module: nn.Module) -> bool:
        return type(module).__module__.startswith("peft.tuners.")

    def base(self, module: Any) -> nn.Module:
        base: nn.Module = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        return base

    def refusal_reason(self, module: Any) -> str | None:
        cls = type(module)
        if not cls.__module__.startswith("peft.tuners.lora") or cls.__name__ not in (
            "Linear",
            "Conv2d",
        ):
            return f"adapter layers of class {cls.__name__} are not known as plain LoRA"
        if module.disable_adapters and module.merged:
            return "a LoRA is fused and switched off, so the layer's next call takes it out again"
        if getattr(module, "base_layer", None) is not self.base(module):
            return "an adapter lies around another one"
        for name in self._live(module):
            if not _is_plain(*(_children(module, kind)[name] for kind in _KINDS)):
                return "a LoRA has layers of its own, a bias or a dropout"
            if name in getattr(module, "lora_variant", {}) or module.use_dora.get(name):
                return "a LoRA variant such as DoRA is active"
            if getattr(module, "lora_bias", {}).get(name):
                return "a LoRA with a bias is active"
            if not _adds_up(module.get_base_layer(), module.lora_A[name]):
                return "a LoRA pads or strides in another way than its layer"
        return None

    def state(self, module: Any) -> Hashable:
        # Each layer's is read at each step. Attributes of an `nn.Module` would take nine tenths of
        # the time, so its dictionaries are read.
        fields = module.__dict__
        weight = _weight_of(_innermost(module))
        parts: list[Hashable] = [weight.dtype, content_of(weight)]
        live = self._live(module)
        if live:
            downs, ups, dropouts = (_children(module, kind) for kind in _KINDS)
            scaling, doras = fields["scaling"], fields["use_dora"]
            variants = fields.get("lora_variant", ())
            parts.append(fields.get("fan_in_fan_out", False))
            for name in live:
                down, up = downs[name], ups[name]
                parts += (
                    name,
                    _content_of_scale(scaling[name]),
                    content_of(_weight_of(down)),
                    content_of(_weight_of(up)),
                    _is_plain(down, up, dropouts[name]),
                    name in variants,
                    bool(doras.get(name)),
                )
        # Merging and unmerging change the base weight without changing its version counter.
        parts += [module.disable_adapters, *module.merged_adapters]
        return tuple(parts)

    def sources(self, module: Any) -> Sequence[torch.Tensor]:
        live = self._live(module)
        if not live:
            return ()
        factors = (_children(module, "lora_A"), _children(module, "lora_B"))
        adapters = [_weight_of(layers[name]) for name in live for layers in factors]
        scaling = module.__dict__["scaling"]
        scales = [s for s in map(scaling.get, live) if isinstance(s, torch.Tensor)]
        return (_weight_of(_innermost(module)), *adapters, *scales)

    def scales(self, module: Any) -> dict[str, Any]:
        found: dict[str, Any] = module.__dict__.get("scaling", {})
        return found

    def merged_weight(
        self, module: Any, weight: torch.Tensor, allocate: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        live = self._live(module)
        if not live:
            return weight
        # The merged weight outlives the autocast under which it may be made.
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            merged = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
            for name in live:
                merged = merged + module.get_delta_weight(name).to(merged)
            return allocate().copy_(merged)

    @staticmethod
    def _live(module: Any) -> list[str]:
        """Return the adapters that the layer's forward adds to its base, in order."""
        if module.disable_adapters or module.merged:
            return []
        downs = _children(module, "lora_A")
        return [name for name in module.active_adapters if name in downs]


def _innermost(module: nn.Module) -> nn.Module:
    """The layer that adapters lie around, as peft's `get_base_layer` finds it."""
    layer: nn.Module | None = module
    while layer is not None:
        module, layer = layer, layer.__dict__["_modules"].get("base_layer")
    return module


def _children(module: nn.Module, name: str) -> dict[str, Any]:
    """An adapter layer's modules of one kind, by the adapter's name."""
    found: dict[str, Any] = module.__dict__["_modules"][name].__dict__["_modules"]
    return found


def _weight_of(layer: nn.Module) -> torch.Tensor:
    fields = layer.__dict__
    found: torch.Tensor | None = fields["_parameters"].get("weight")
    return layer.weight if found is None or "weight" in fields else found  # type: ignore[return-value]


def _content_of_scale(scale: Any) -> Hashable:
    """A scale by value. peft keeps a tensor for adapters that are swapped in place (hotswap)."""
    return content_of(scale) if isinstance(scale, torch.Tensor) else scale


def _is_plain(down: nn.Module, up: nn.Module, dropout: nn.Module) -> bool:
    """Whether an adapter consists of two layers of torch without a bias, and drops nothing."""
    for layer in (down, up):
        fields = layer.__dict__
        if type(layer) not in _PLAIN or "bias" in fields:
            return False
        if fields["_parameters"].get("bias") is not None:
            return False
    return type(dropout) is nn.Identity or _drops_nothing(dropout)


def _drops_nothing(dropout: Any) -> bool:
    return type(dropout) is nn.Dropout and not (dropout.training and dropout.p > 0)


def _adds_up(base: Any, down: Any) -> bool:
    """Whether one convolution with summed weights equals the sum of both convolutions."""
    names = ("stride", "padding", "dilation", "padding_mode")
    return all(getattr(base, name, None) == getattr(down, name, None) for name in names)
