"""The GPU's memory in Forge and its descendants: what CUDA graphs hold, and moves of models.

The host asks `get_free_memory` how much there is, unloads models in `free_memory` until there is
enough, and then loads as much of a model as fits. To the host, a CUDA graph's pool looks unused and
is not. So before the host counts on memory that only looks free, CUDA graphs give theirs back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

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


class StreamedLayers:
    """Layers that the host leaves in main memory and streams to the GPU at each step.

    They are pinned where they are, since the GPU reads ordinary main memory at a fraction of the
    bus's speed. It reads pinned memory while Python goes on, so before anybody may write to such
    a weight, `wait` lets it end.

    Args:
        moves: Decides how much memory is pinned, and when.
    """

    def __init__(self, moves: PinnedMoves) -> None:
        self._moves = moves
        self._are_pinned = False

    def pin(self, memory_management: Any) -> None:
        """Pin layers of the models that the host has loaded, after the moves' ``with`` block.

        Args:
            memory_management: The host's Python module.
        """
        weights = [
            weight
            for loaded in getattr(memory_management, "current_loaded_models", ())
            if getattr(getattr(loaded, "device", None), "type", None) == "cuda"
            and isinstance(
                model := getattr(getattr(loaded, "model", None), "model", None), nn.Module
            )
            for weight in model.parameters()
        ]
        self._are_pinned = self._moves.pin(weights) > 0

    def wait(self, *_: Any) -> None:
        """Wait until the GPU has read what was streamed; a hook behind a model's forward."""
        if self._are_pinned and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()


def move_through_pinned_memory(
    memory_management: Any, patches: Patches, moves: PinnedMoves, streamed: StreamedLayers
) -> None:
    """Let the host's memory management move models, and parts of them, through pinned memory.

    Args:
        memory_management: The host's Python module.
        patches: Makes the changes and undoes them.
        moves: Entered around whatever moves models.
        streamed: Takes care of what the host does not move.
    """

    def pinned(move: Callable[..., Any], loads: bool) -> Callable[..., Any]:
        def moving(*args: Any, **kwargs: Any) -> Any:
            streamed.wait()
            with moves:
                moved = move(*args, **kwargs)
            if loads:
                streamed.pin(memory_management)
            return moved

        return moving

    for name in ("free_memory", "load_models_gpu"):
        if (move := getattr(memory_management, name, None)) is not None:
            patches.set(memory_management, name, pinned(move, name == "load_models_gpu"))
