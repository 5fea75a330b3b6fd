"""The GPU's memory in Forge and its descendants: what CUDA graphs hold, and moves of models.

The host asks `get_free_memory` how much there is, unloads models in `free_memory` until there is
enough, and then loads as much of a model as fits. To the host, a CUDA graph's pool looks unused and
is not. So before the host counts on memory that only looks free, CUDA graphs give theirs back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onediff_ext.engine.patches import Patches
from onediff_ext.hosts.pinned_moves import PinnedMoves


def share_with(
    memory_management: Any,
    patches: Patches,
    make_room: Callable[[int, torch.device], None],
    returnable: Callable[[], int],
) -> None:
    """Let the host's memory management take memory from CUDA graphs.

    Args:
        memory_management: The host's Python module.
        patches: Makes the changes and undoes them.
        make_room, returnable: As for `WebUIHost.share_memory`.
    """
    free_memory = getattr(memory_management, "free_memory", None)
    get_free_memory = getattr(memory_management, "get_free_memory", None)
    if free_memory is None or get_free_memory is None:
        return

    def freeing(memory_required: float, device: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(device, "type", None) == "cuda":
            make_room(int(min(memory_required, 2**62)), device)
        return free_memory(memory_required, device, *args, **kwargs)

    def counting(dev: Any = None, torch_free_too: bool = False) -> Any:
        free = get_free_memory(dev, torch_free_too)
        if getattr(dev or memory_management.get_torch_device(), "type", None) != "cuda":
            return free
        more = returnable()
        return (free[0] + more, free[1]) if torch_free_too else free + more

    patches.set(memory_management, "free_memory", freeing)
    patches.set(memory_management, "get_free_memory", counting)


def move_through_pinned_memory(
    memory_management: Any, patches: Patches, moves: PinnedMoves
) -> None:
    """Let the host's memory management move models, and parts of them, through pinned memory.

    Args:
        memory_management: The host's Python module.
        patches: Makes the changes and undoes them.
        moves: Entered around whatever moves models.
    """

    def pinned(move: Callable[..., Any]) -> Callable[..., Any]:
        def moving(*args: Any, **kwargs: Any) -> Any:
            with moves:
                return move(*args, **kwargs)

        return moving

    for name in ("free_memory", "load_models_gpu"):
        if (move := getattr(memory_management, name, None)) is not None:
            patches.set(memory_management, name, pinned(move))
