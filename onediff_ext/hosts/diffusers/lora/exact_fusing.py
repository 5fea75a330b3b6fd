"""Exact unfusing of a LoRA: the original weights return, without rounding errors.

peft subtracts what it added, which leaves rounding errors. After some rounds the weights are no
longer those of the checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

_MODELS = ("unet", "transformer", "transformer_2", "text_encoder", "text_encoder_2")


class ExactFusing:
    """A pipeline's `fuse_lora` and `unfuse_lora` that keep copies of the original weights.

    Args:
        pipe: A diffusers pipeline with LoRA support.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._fuse: Callable[..., Any] = pipe.fuse_lora
        self._unfuse: Callable[..., Any] = pipe.unfuse_lora
        self._originals: dict[int, tuple[Any, torch.Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactFusing:
        return ExactFusing(copy.deepcopy(self._pipe, memo))

    def fuse_lora(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline's own method; copies of the weights stay in main memory."""
        for layer in self._layers():
            if not layer.merged and id(layer) not in self._originals:
                weight = layer.get_base_layer().weight.detach()
                self._originals[id(layer)] = (layer, weight.to("cpu", copy=True))
        return self._fuse(*args, **kwargs)

    def unfuse_lora(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline's own method, then restore the exact weights."""
        result = self._unfuse(*args, **kwargs)
        for key, (layer, original) in list(self._originals.items()):
            if layer.merged:
                continue
            del self._originals[key]
            weight = layer.get_base_layer().weight
            if _is_rounding(weight, original):
                weight.data.copy_(original)
        return result

    def _layers(self) -> Iterator[Any]:
        for name in _MODELS:
            model = getattr(self._pipe, name, None)
            for module in model.modules() if model is not None else ():
                if hasattr(module, "merged_adapters") and hasattr(module, "get_base_layer"):
                    yield module


def _is_rounding(weight: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether a weight differs from the original only by rounding."""
    if weight.shape != original.shape or weight.dtype != original.dtype:
        return False
    tolerance = 8 * torch.finfo(original.dtype).eps
    difference = (weight.detach().cpu().float() - original.float()).norm()
    return bool(difference <= tolerance * original.float().norm().clamp_min(1e-30))
