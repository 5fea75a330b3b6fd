"""Which device takes the other half of a batch."""

from __future__ import annotations

from functools import cache

import torch

from onediff_ext.engine.machine import machine_entries

AUTO = "auto"


def second_device(wanted: str, first: torch.device) -> torch.device | str:
    """Return the device beside the one that a model lies on.

    Graphs fit one kind of machine, so both must be of one kind.

    Args:
        wanted: ``"auto"`` for another GPU of the same kind, or a device's name such as "cuda:1".
        first: Where the model lies.

    Returns:
        The device, or a text that says why there is none.
    """
    if wanted == AUTO:
        if first.type == "cuda":
            for index in range(torch.cuda.device_count()):
                if index != _index(first) and _is_same_kind(first, index):
                    return torch.device("cuda", index)
        return "there is no second GPU of the same kind"
    second = torch.device(wanted)
    if second.type != first.type:
        return f"the model lies on {first}, not on a device like {second}"
    if second.type != "cuda":
        return second
    second = torch.device("cuda", _index(second))
    if second.index >= torch.cuda.device_count():
        return f"torch sees no GPU {second}"
    if second.index == _index(first):
        return f"the model lies on {second} itself"
    if not _is_same_kind(first, second.index):
        return f"{second} is a GPU of another kind"
    return second


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _is_same_kind(first: torch.device, index: int) -> bool:
    return machine_entries("cuda", _index(first)) == machine_entries("cuda", index)
