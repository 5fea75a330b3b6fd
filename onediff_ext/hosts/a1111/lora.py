"""What A1111's built-in Lora extension does to layers: it merges inside each layer's forward.

A graph that takes the place of a block never calls those forwards, so what is pending is
merged before each forward of the UNet. Source: extensions-builtin/Lora/networks.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
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

# Classes of which blocks consist, by their place in `ldm` and `sgm`. What an up- or downsampler or
# the UNet itself computes does not matter: these are no part of a graph.
_PARTS = {
    "modules.attention": ("BasicTransformerBlock", "FeedForward", "GEGLU"),
    "modules.diffusionmodules.openaimodel": ("ResBlock",),
    "modules.diffusionmodules.util": ("GroupNorm32",),
    "modules.diffusionmodules.model": ("ResnetBlock", "AttnBlock"),
}
# A1111's own choices of attention, for which graphs have one of their own.
_OWN_ATTENTION = "modules.sd_hijack_optimizations"
# Where there is a GPU, A1111 itself patches GEGLU and GroupNorm32 of `ldm`, by its class CondFunc:
# they cast for --upcast-sampling, which no job runs graphs with, and do nothing otherwise.
_CONDITIONAL = "modules.sd_hijack_utils"
_UPCASTS = "modules.sd_hijack_unet"

# What others keep on layers and blocks for themselves: Lora (names, backups, what was merged last),
# fp8 storage, and ControlNet, which never takes away what its reference mode has noted.
LAYER_STATE = frozenset(
    {
        "network_layer_name",
        "network_current_names",
        "network_weights_backup",
        "network_bias_backup",
        "fp16_weight",
        "fp16_bias",
        "bank",
        "style_cfgs",
        "attn_weight",
        "lllite_list",
    }
)


class PendingNetworks:
    """A forward pre-hook of the UNet that merges LoRAs as the layers themselves would have.

    Costs about 1 ms when nothing has changed: each layer compares what it has with what
    is wanted, since a checkpoint that is loaded resets it.
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
    """The built-in extension's module if it has patched the layers, else None."""
    module = sys.modules.get(nn.Linear.forward.__module__)
    known = getattr(module, "network_Linear_forward", None)
    return module if known is nn.Linear.forward else None


def foreign_patch() -> str | None:
    """Which class of layers or blocks runs code that is neither its own nor the built-in
    extension's."""
    networks = lora_module()
    for cls in LAYERS:
        forward = cls.forward
        ours = getattr(networks, f"network_{cls.__name__}_forward", None)
        if forward is not ours and not forward.__module__.startswith("torch.nn.modules."):
            return f"{cls.__name__} is patched by {forward.__module__}"
    for cls in _parts():
        known = {_OWN_ATTENTION, *(base.__module__ for base in cls.__mro__)}
        # A1111 puts `ldm`'s own attention into `sgm` too.
        known |= {f"ldm.{place}" for place in _PARTS}
        for name in ("forward", "_forward"):
            method = _without_upcasts(getattr(cls, name, None))
            if method is not None and method.__module__ not in known:
                return f"{cls.__name__} is patched by {method.__module__}"
    return None


def _without_upcasts(method: Any) -> Any:
    """What a method does that A1111 has made cast for --upcast-sampling, when that is not on."""
    while getattr(method, "__module__", None) == _CONDITIONAL:
        kept = [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]
        patches = [vars(one) for one in kept if type(one).__name__ == "CondFunc"]
        if not patches or patches[0]["_CondFunc__sub_func"].__module__ != _UPCASTS:
            return method
        method = patches[0]["_CondFunc__orig_func"]
    return method


def _parts() -> Iterator[type[nn.Module]]:
    for package in ("ldm", "sgm"):
        for place, names in _PARTS.items():
            module = sys.modules.get(f"{package}.{place}")
            for name in names:
                cls = getattr(module, name, None)
                if cls is not None:
                    yield cls
