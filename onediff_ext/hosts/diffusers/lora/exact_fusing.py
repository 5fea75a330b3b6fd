"""Exact unfusing of a LoRA: the original weights return, without rounding errors.

peft subtracts what it added, which leaves rounding errors. After some rounds the weights are no
longer those of the checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from onediff_ext.engine.validity.tensor_contents import digest_of

_MODELS = ("unet", "transformer", "transformer_2", "text_encoder", "text_encoder_2")


class _Read(NamedTuple):
    """What a layer's unfusing reads, by content.

    Args:
        weights: Of the layer itself.
        adapters: Scale and factors of each fused adapter.
    """

    weights: Hashable
    adapters: dict[str, Hashable]

    @classmethod
    def of(cls, layer: Any) -> _Read:
        """Read one of peft's layers as it is now."""
        scaling = getattr(layer, "scaling", {})
        digests = [(name, digest_of(weight)) for name, weight in layer.named_parameters()]
        weights = tuple(each for each in digests if each[0].startswith("base_layer."))
        adapters: dict[str, Hashable] = {}
        for adapter in layer.merged_adapters:
            scale = scaling.get(adapter)
            # Those of adapters that are swapped in place (hotswap) are tensors.
            known = digest_of(scale) if isinstance(scale, torch.Tensor) else scale
            factors = tuple(each for each in digests if adapter in each[0].split("."))
            adapters[adapter] = known, factors
        return cls(weights, adapters)


@dataclass
class _Fused:
    """A layer whose LoRAs were fused.

    Args:
        layer: peft's layer.
        original: A copy of its weight before, in main memory.
        left: What unfusing reads, as `fuse_lora` left it; None until then.
    """

    layer: Any
    original: torch.Tensor
    left: _Read | None = None


class ExactFusing:
    """A pipeline's `fuse_lora` and `unfuse_lora` that keep copies of the original weights.

    A weight is restored only if all that diffusers' `unfuse_lora` reads is bit for bit what
    `fuse_lora` left: the weight, the LoRAs in it, their factors and scales. Otherwise it has been
    changed since, and diffusers' result stays. So does another `fuse_lora` whose `lora_scale`
    changes the scale of a LoRA that is in the weight already.

    Args:
        pipe: A diffusers pipeline with LoRA support.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._fuse: Callable[..., Any] = pipe.fuse_lora
        self._unfuse: Callable[..., Any] = pipe.unfuse_lora
        self._fused: dict[int, _Fused] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactFusing:
        return ExactFusing(copy.deepcopy(self._pipe, memo))

    def fuse_lora(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline's own method; copies of the weights stay in main memory."""
        self._forget_changed()
        for layer in self._layers():
            if not layer.merged and id(layer) not in self._fused:
                weight = layer.get_base_layer().weight.detach()
                self._fused[id(layer)] = _Fused(layer, weight.to("cpu", copy=True))
        result = self._fuse(*args, **kwargs)
        for key, fused in list(self._fused.items()):
            left, earlier = _Read.of(fused.layer), fused.left.adapters if fused.left else {}
            if left.adapters and earlier.items() <= left.adapters.items():
                fused.left = left
            else:
                del self._fused[key]
        return result

    def unfuse_lora(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline's own method, then restore the exact weights."""
        self._forget_changed()
        result = self._unfuse(*args, **kwargs)
        for key, fused in list(self._fused.items()):
            if not fused.layer.merged:
                del self._fused[key]
                fused.layer.get_base_layer().weight.data.copy_(fused.original)
        return result

    def _forget_changed(self) -> None:
        """Forget the layers that are gone, and those that somebody changed since `fuse_lora`."""
        present = set(map(id, self._layers()))
        self._fused = {
            key: fused
            for key, fused in self._fused.items()
            if key in present and fused.left == _Read.of(fused.layer)
        }

    def _layers(self) -> list[Any]:
        models = (getattr(self._pipe, name, None) for name in _MODELS)
        return [
            module
            for model in models
            if model is not None
            for module in model.modules()
            if hasattr(module, "merged_adapters") and hasattr(module, "get_base_layer")
        ]
