"""How Neo and reForge add a LoRA to a layer's weight at each call, where models fit in part."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.support.ldm_stand_in import live_in, written_in

HOMES = {
    "neo": ("backend.patcher.base", "modules_forge.packages.comfy.weight_adapter.lora"),
    "reforge": ("ldm_patched.modules.model_patcher", "ldm_patched.modules.weight_adapter.lora"),
}
"""By host: the modules of the functions and of a LoRA's matrices."""


MERGES = {
    "neo": ("backend.patcher.base", "merge_lora_to_weight"),
    "reforge": ("ldm_patched.modules.lora", "calculate_weight"),
}
"""By host: the function that all of them call, by its module and name."""


def lora_modules(name: str) -> dict[str, dict[str, Any]]:
    """The contents of a host's modules; empty for Forge, which adds LoRAs in another way."""
    if name not in HOMES:
        return {}
    contents: dict[str, dict[str, Any]] = {}
    home, merge = MERGES[name]
    contents.setdefault(home, {})[merge] = written_in(_merge, home)  # type: ignore[arg-type]
    for cls, home in zip(_classes(*MERGES[name]), HOMES[name], strict=True):
        live_in(cls, home)
        cls.__qualname__ = cls.__name__
        contents.setdefault(home, {})[cls.__name__] = cls
    return contents


def _merge(patches: list[Any], weight: torch.Tensor) -> torch.Tensor:
    for strength, added, weight_strength, part, function, *_ in patches:
        target = weight if part is None else weight.narrow(*part)
        if weight_strength != 1.0:
            target *= weight_strength
        if isinstance(added, tuple):
            (difference,) = added
            made = difference.to(weight.device, weight.dtype, non_blocking=True) * strength
        else:
            made = added.calculate(target, strength)
        target += made if function is None else function(made)
    return weight


def _classes(home: str, merge: str) -> tuple[type, type]:
    class LowVramPatch:
        """Merges the patches of one weight into a copy of it, which it writes to."""

        def __init__(self, key: str, patches: dict[str, list[Any]]) -> None:
            self.key, self.patches = key, patches

        def __call__(self, weight: torch.Tensor) -> torch.Tensor:
            merged: torch.Tensor = getattr(sys.modules[home], merge)(self.patches[self.key], weight)
            return merged

    class LoRAAdapter:
        """A LoRA's matrices; its errors end in the host's log."""

        def __init__(self, weights: tuple[Any, ...]) -> None:
            self.weights = weights

        def calculate(self, weight: torch.Tensor, strength: float) -> torch.Tensor:
            up, down, alpha, *_ = self.weights
            try:
                up = up.to(weight.device, weight.dtype, non_blocking=True)
                down = down.to(weight.device, weight.dtype, non_blocking=True)
                scale = strength * alpha / down.shape[0]
                return (up.flatten(1) @ down.flatten(1) * scale).view(weight.shape)
            except Exception:
                return torch.zeros_like(weight)

    return LowVramPatch, LoRAAdapter


class StreamedLora:
    """A LoRA of some layers of a model, not merged.

    Args:
        host: The running stand-in's name.
        seed: Of its numbers.

    Attributes:
        patches: What the host's patcher holds, by the weight's name.
    """

    def __init__(self, host: str, seed: int = 0) -> None:
        functions, matrices = (sys.modules[home] for home in HOMES[host])
        self._function, self._matrices = functions.LowVramPatch, matrices.LoRAAdapter
        self._noise = torch.Generator().manual_seed(seed)
        self.patches: dict[str, list[Any]] = {}

    def add(self, model: torch.nn.Module, name: str, strength: float = 1.0, rank: int = 2) -> None:
        """Add matrices to a layer. The host's LoRAs are inference tensors, as its weights are."""
        weight: torch.Tensor = model.get_submodule(name).weight  # type: ignore[assignment]
        with torch.inference_mode():
            up = torch.randn(weight.shape[0], rank, generator=self._noise) / 4
            down = torch.randn(rank, weight[0].numel(), generator=self._noise) / 4
            up, down = up.to(weight.dtype), down.to(weight.dtype)
        adapter = self._matrices((up, down, float(rank), None, None, None))
        self.patches.setdefault(f"{name}.weight", []).append(
            (strength, adapter, 1.0, None, None, False)
        )

    def switch(self, model: torch.nn.Module, on: bool) -> None:
        """Let the layers of a model apply the LoRA at each call, or no longer."""
        for key in self.patches:
            layer: Any = model.get_submodule(key.removesuffix(".weight"))
            layer.weight_function = [self._function(key, self.patches)] if on else []

    def tensors(self) -> list[torch.Tensor]:
        """All matrices."""
        return [t for patches in self.patches.values() for p in patches for t in p[1].weights[:2]]
