"""LoRA in A1111: its built-in extension "Lora", which merges weights inside each layer's forward.

A graph that takes the place of a block never calls the forwards of its layers, so pending LoRAs are
merged before each forward of the UNet. Source: extensions-builtin/Lora/networks.py of A1111 1.10.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from types import ModuleType
from typing import Any

from torch import nn

# The extension's Python module, which puts its forwards into torch's classes of layers.
MODULE = "networks"
# These classes.
LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv2d,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.MultiheadAttention,
)
# What it keeps on layers: names, backups, what was merged last.
LAYER_ATTRS = frozenset(
    {
        "network_layer_name",
        "network_current_names",
        "network_weights_backup",
        "network_bias_backup",
    }
)


class PendingNetworks:
    """A forward pre-hook of the UNet that merges LoRAs as the layers would have.

    A call takes about 1 ms when nothing has changed: each layer compares what is merged with what
    is wanted, since loading a checkpoint resets it.
    """

    def __init__(self) -> None:
        self._layers: list[nn.Module] = []

    def find_layers(self, unet: nn.Module) -> None:
        """Look for the layers that the UNet has now."""
        self._layers = [module for module in unet.modules() if isinstance(module, LAYERS)]

    def __call__(self, *_: Any) -> None:
        networks = lora_module()
        if networks is not None:
            for layer in self._layers:
                networks.network_apply_weights(layer)


def lora_module() -> ModuleType | None:
    """The extension's module if it has patched the layers, else None."""
    module = sys.modules.get(nn.Linear.forward.__module__)
    known = getattr(module, "network_Linear_forward", None)
    return module if known is nn.Linear.forward else None


def lora_forward(layer_class: type[nn.Module]) -> object | None:
    """The forward that the extension puts into a class of layers; None while it is off."""
    return getattr(lora_module(), f"network_{layer_class.__name__}_forward", None)


def loaded_loras() -> Hashable:
    """A value that differs when other LoRAs are loaded, or with other strengths."""
    loaded = getattr(lora_module(), "loaded_networks", ())
    return tuple((n.name, n.te_multiplier, n.unet_multiplier, n.dyn_dim) for n in loaded)


def lora_eager_reason() -> str | None:
    """Why LoRAs keep a job eager, or None: a setting applies them in each forward, unmerged."""
    from modules import shared

    if getattr(shared.opts, "lora_functional", False):
        return 'the setting "Lora/Networks: use old method" applies LoRAs in each forward'
    return None
