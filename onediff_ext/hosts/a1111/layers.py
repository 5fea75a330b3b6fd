"""What A1111's built-in Lora extension does to layers: it merges inside each layer's forward.

A graph that takes the place of a block never calls those forwards, so what is pending is
merged before each forward of the UNet. Source: extensions-builtin/Lora/networks.py.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torch import nn

LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv2d,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.MultiheadAttention,
)

# What Lora and fp8 storage keep on a layer: names, backups, what was merged last.
LAYER_STATE = frozenset(
    {
        "network_layer_name",
        "network_current_names",
        "network_weights_backup",
        "network_bias_backup",
        "fp16_weight",
        "fp16_bias",
    }
)


class PendingNetworks:
    """A forward pre-hook of the UNet that merges LoRAs as the layers themselves would have.

    Costs about 1 ms when nothing has changed: each layer compares what it has with what
    is wanted, since a checkpoint that is loaded resets it.
    """

    def __init__(self, unet: nn.Module) -> None:
        self._layers = [module for module in unet.modules() if isinstance(module, LAYERS)]

    def __call__(self, *_: Any) -> None:
        networks = lora_module()
        if networks is not None:
            for layer in self._layers:
                networks.network_apply_weights(layer)


def lora_module() -> ModuleType | None:
    """The built-in extension's module if it has patched the layers, else None."""
    module = sys.modules.get(nn.Linear.forward.__module__)
    known = getattr(module, "network_Linear_forward", None)
    return module if known is nn.Linear.forward else None


def foreign_patch() -> str | None:
    """Which layer's class runs code that is neither torch's nor the built-in extension's."""
    networks = lora_module()
    for cls in LAYERS:
        forward = cls.forward
        ours = getattr(networks, f"network_{cls.__name__}_forward", None)
        if forward is not ours and not forward.__module__.startswith("torch.nn.modules."):
            return f"{cls.__name__} is patched by {forward.__module__}"
    return None
