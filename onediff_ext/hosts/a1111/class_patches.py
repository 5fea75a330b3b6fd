"""Classes of layers and blocks that another extension has patched.

The engine's own check of classes (in `onediff_ext.engine.validity`) trusts every method that
A1111's ``modules`` put into them. That is too much in two cases, so each job is checked here as
well. A1111 wraps methods with its class CondFunc, which other extensions may use too: then the
wrapper is A1111's, and the function within it is not. And a patch of A1111 that is unknown here may
change what a block computes. The whole job runs eager then, with one reason.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from onediff_ext.hosts.a1111.lora import LAYERS, lora_forward

# Classes that blocks consist of, by their module in `ldm` and `sgm`. Up- and downsamplers and the
# UNet itself are missing: no graph contains them.
_PARTS = {
    "modules.attention": ("BasicTransformerBlock", "FeedForward", "GEGLU"),
    "modules.diffusionmodules.openaimodel": ("ResBlock",),
    "modules.diffusionmodules.util": ("GroupNorm32",),
    "modules.diffusionmodules.model": ("ResnetBlock", "AttnBlock"),
}
# A1111's own choices of attention; graphs have their own.
_OWN_ATTENTION = "modules.sd_hijack_optimizations"
# With a GPU, A1111 patches GEGLU and GroupNorm32 of `ldm` by its class CondFunc. The patches cast
# for --upcast-sampling, with which every job runs eager, and do nothing otherwise.
_CONDITIONAL = "modules.sd_hijack_utils"
_UPCASTS = "modules.sd_hijack_unet"


def unknown_patch_reason() -> str | None:
    """Which class of layers or blocks runs code of another extension than Lora, or None."""
    for cls in _torch_classes():
        for name in ("__call__", "_call_impl", "_wrapped_call_impl", "forward"):
            method = vars(cls).get(name)
            if method is None or (cls in LAYERS and method is lora_forward(cls)):
                continue
            if not method.__module__.startswith("torch.nn.modules."):
                return f"{cls.__name__} is patched by {method.__module__}"
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
    """The method that A1111 has wrapped to cast for --upcast-sampling, or the method as it is."""
    while getattr(method, "__module__", None) == _CONDITIONAL:
        kept = [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]
        patches = [vars(one) for one in kept if type(one).__name__ == "CondFunc"]
        if not patches or patches[0]["_CondFunc__sub_func"].__module__ != _UPCASTS:
            return method
        method = patches[0]["_CondFunc__orig_func"]
    return method


@functools.cache
def _torch_classes() -> tuple[type[nn.Module], ...]:
    """All layers of torch, Lora's first: A1111 itself patches those only."""
    found = (value for value in vars(nn).values() if isinstance(value, type))
    layers = (cls for cls in found if issubclass(cls, nn.Module) and cls not in LAYERS)
    return *LAYERS, *(cls for cls in layers if cls.__module__.startswith("torch.nn.modules."))


def _parts() -> Iterator[type[nn.Module]]:
    for package in ("ldm", "sgm"):
        for place, names in _PARTS.items():
            module = sys.modules.get(f"{package}.{place}")
            for name in names:
                cls = getattr(module, name, None)
                if cls is not None:
                    yield cls
