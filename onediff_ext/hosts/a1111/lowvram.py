"""Models that A1111 moves to the GPU and back, with --medvram and --lowvram."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from onediff_ext.engine.validity.foreign_code import defining_module


def bring_to_gpu(module: nn.Module) -> None:
    """Move a model to the GPU as the host does before it runs.

    The host's hook moves another model out for it. It does nothing without these options.

    Args:
        module: One of the host's models.
    """
    for hook in _moving_hooks(module):
        hook(module, ())


def moved_models(model: nn.Module | None) -> list[nn.Module]:
    """Return what the host moves as a whole; nothing without these options.

    It is asked for each picture. Where the host says that it moves nothing, no module is looked at.

    Args:
        model: The host's model, of which these are parts; None before it is loaded.
    """
    if model is None or not getattr(model, "lowvram", True):
        return []
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        for hook in _moving_hooks(module):
            found.setdefault(_moved_by(hook, module))
    return list(found)


def _moving_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    hooks = module._forward_pre_hooks.values()
    return [hook for hook in hooks if defining_module(hook) == "modules.lowvram"]


def _moved_by(hook: Callable[..., Any], module: nn.Module) -> nn.Module:
    """The module itself, or the one that the host notes as its parent."""
    for cell in getattr(hook, "__closure__", None) or ():
        if isinstance(parents := cell.cell_contents, dict):
            parent = parents.get(module, module)
            if isinstance(parent, nn.Module):
                return parent
    return module
