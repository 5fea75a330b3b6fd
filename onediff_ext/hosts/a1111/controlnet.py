"""ControlNet in A1111: the networks that Mikubill's extension runs beside the UNet.

Its script keeps a hook for the length of a job. The hook replaces the UNet's forward by its own and
calls the UNet's blocks from there. Source: scripts/hook.py and scripts/controlnet.py of v1.1.455.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


def control_models(unet: nn.Module | None) -> Iterable[nn.Module]:
    """The networks that run beside this UNet in the current job, each once."""
    found: dict[int, nn.Module] = {}
    for script in _scripts():
        hook: Any = getattr(script, "latest_network", None)
        # With lowvram it moves them in and out at each step.
        if hook is None or getattr(hook, "model", None) is not unet or hook.lowvram:
            continue
        for unit in getattr(hook, "control_params", None) or ():
            network = getattr(unit.control_model, "control_model", None)
            if isinstance(network, nn.Module):
                found[id(network)] = network
    return found.values()


def owner_of(network: nn.Module) -> nn.Module | None:
    """The object that keeps a network between jobs; None if nothing does.

    It dies when the extension gives the network up. Each job has a copy of it, around the same
    network.
    """
    for script in _scripts():
        for kept in (getattr(script, "model_cache", None) or {}).values():
            around = getattr(kept, "model", None)
            if isinstance(around, nn.Module) and getattr(around, "control_model", None) is network:
                return around
    return None


def _scripts() -> Iterator[object]:
    from modules import scripts

    for runner in (scripts.scripts_txt2img, scripts.scripts_img2img):
        yield from getattr(runner, "alwayson_scripts", ())
