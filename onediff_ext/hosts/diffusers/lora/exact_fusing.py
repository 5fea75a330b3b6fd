"""Exact unfusing of a LoRA: the original weights return, without rounding errors.

peft subtracts what it added, which leaves rounding errors. After some rounds the weights are no
longer those of the checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from onediff_ext.engine.validity.tensor_contents import digest_of

_MODELS = ("unet", "transformer", "transformer_2", "text_encoder", "text_encoder_2")


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
    left: Hashable = None


class ExactFusing:
    """A pipeline's `fuse_lora` and `unfuse_lora` that keep copies of the original weights.

    A weight is restored only if all that diffusers' `unfuse_lora` reads is bit for bit what
    `fuse_lora` left: the weight, the LoRAs in it, their factors and scales. Otherwise somebody has
    changed it since, and diffusers' result stays.

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
            if fused.layer.merged:
                fused.left = _read_by_unfusing(fused.layer)
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
            if key in present and fused.left == _read_by_unfusing(fused.layer)
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


def _read_by_unfusing(layer: Any) -> Hashable:
    """Return what identifies all that a layer's unfusing reads, by content."""
    merged = tuple(layer.merged_adapters)
    scaling = getattr(layer, "scaling", {})
    read = [
        (name, digest_of(parameter))
        for name, parameter in layer.named_parameters()
        if name.startswith("base_layer.") or not set(merged).isdisjoint(name.split("."))
    ]
    scales = [scaling.get(name) for name in merged]
    # Those of adapters that are swapped in place (hotswap) are tensors.
    scales = [digest_of(s) if isinstance(s, torch.Tensor) else s for s in scales]
    return merged, tuple(scales), tuple(read)
