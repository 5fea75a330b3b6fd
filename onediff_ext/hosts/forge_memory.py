"""The GPU's memory in Forge and its descendants: what CUDA graphs hold, and moves of models.

The host asks `get_free_memory` how much there is, unloads models in `free_memory` until there is
enough, and then loads as much of a model as fits. To the host, a CUDA graph's pool looks unused and
is not. So before the host counts on memory that only looks free, CUDA graphs give theirs back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from onediff_ext.engine.patches import Patches
from onediff_ext.hosts.forge_weight_functions import LowVramPatches
from onediff_ext.hosts.pinned_moves import PinnedMoves, is_in_pinned_memory


class StreamedLayers:
    """Layers that the host leaves in main memory and streams to the GPU at each step.

    They are pinned where they are, since the GPU reads ordinary main memory at a fraction of the
    bus's speed. It reads pinned memory while Python goes on, so before anybody may write to such
    a weight, `wait` lets it end. Only the stream that a forward ran on is waited for: another
    thread may be recording a CUDA graph, which a wait for the whole GPU would end.

    Args:
        moves: Decides how much memory is pinned, and when.
        weight_functions: Know which tensors such layers read at each step besides their weights.
    """

    def __init__(self, moves: PinnedMoves, weight_functions: Sequence[LowVramPatches] = ()) -> None:
        self._moves, self._functions = moves, tuple(weight_functions)
        self._readers: list[torch.device] = []  # GPUs that read pinned layers
        # Whether a model has such layers, since the last move.
        self._has_pinned: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

    def forget(self) -> None:
        """Note that the host has moved weights."""
        self._has_pinned.clear()

    def pin(self, memory_management: Any) -> None:
        """Pin layers of the models that the host has loaded, after the moves' ``with`` block.

        Args:
            memory_management: The host's Python module.
        """
        weights: dict[torch.device, list[torch.Tensor | None]] = {}
        for loaded in getattr(memory_management, "current_loaded_models", ()):
            device: Any = getattr(loaded, "device", None)
            model = getattr(getattr(loaded, "model", None), "model", None)
            if getattr(device, "type", None) == "cuda" and isinstance(model, nn.Module):
                weights.setdefault(device, []).extend(self._streamable(model))
        self._readers = [gpu for gpu, each in weights.items() if self._moves.pin(each, gpu)]

    def wait(self, model: nn.Module | None = None, *_: Any) -> None:
        """Wait until the GPU has read what was streamed; a hook behind a model's forward.

        Args:
            model: Whose forward has ended, which streams nothing if it is on the GPU as a whole.
                None stands for all models.
        """
        if (
            self._readers
            and not torch.cuda.is_current_stream_capturing()
            and (model is None or self._is_streamed(model))
        ):
            for gpu in self._readers:
                torch.cuda.current_stream(gpu).synchronize()

    def _is_streamed(self, model: nn.Module) -> bool:
        if model not in self._has_pinned:
            self._has_pinned[model] = any(map(is_in_pinned_memory, self._streamable(model)))
        return self._has_pinned[model]

    def _streamable(self, model: nn.Module) -> list[torch.Tensor | None]:
        """What a model's layers may read in main memory."""
        return [*_parameters(model), *(t for rule in self._functions for t in rule.tensors(model))]


class MemoryFunctions:
    """Functions of a host's memory management, and what takes their places while a job runs.

    Blocks call some of them, and a new function there would mean that code of the process has
    changed, so that each block is examined again. So a function of the host has one replacement,
    which all jobs use.

    Args:
        moves: Entered around whatever moves models.
        streamed: Takes care of what the host does not move.
    """

    def __init__(self, moves: PinnedMoves, streamed: StreamedLayers) -> None:
        self._moves, self._streamed = moves, streamed
        # By name and purpose: a function of the host, and its replacement.
        self._made: dict[tuple[str, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._make_room: Callable[[int, torch.device], None] = lambda *_: None
        self._returnable: Callable[[], int] = lambda: 0

    def share(
        self,
        memory_management: Any,
        patches: Patches,
        make_room: Callable[[int, torch.device], None],
        returnable: Callable[[], int],
    ) -> None:
        """Let the host take memory from CUDA graphs.

        Args:
            memory_management: The host's Python module.
            patches: Makes the changes and undoes them.
            make_room, returnable: As for `WebUIHost.share_memory`.
        """
        self._make_room, self._returnable = make_room, returnable
        self._put_back(memory_management)
        free_memory = getattr(memory_management, "free_memory", None)
        get_free_memory = getattr(memory_management, "get_free_memory", None)
        if free_memory is None or get_free_memory is None:
            return

        def freeing(memory_required: float, device: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(device, "type", None) == "cuda":
                self._make_room(int(min(memory_required, 2**62)), device)
            return free_memory(memory_required, device, *args, **kwargs)

        def counting(dev: Any = None, torch_free_too: bool = False) -> Any:
            free = get_free_memory(dev, torch_free_too)
            if getattr(dev or memory_management.get_torch_device(), "type", None) != "cuda":
                return free
            more = self._returnable()
            return (free[0] + more, free[1]) if torch_free_too else free + more

        self._replace(memory_management, patches, "free_memory", "shared", freeing)
        self._replace(memory_management, patches, "get_free_memory", "shared", counting)

    def speed_up_moves(self, memory_management: Any, patches: Patches) -> None:
        """Let the host move models, and parts of them, through pinned memory.

        Args:
            memory_management: The host's Python module.
            patches: Makes the changes and undoes them.
        """

        def pinned(move: Callable[..., Any], loads: bool) -> Callable[..., Any]:
            def moving(*args: Any, **kwargs: Any) -> Any:
                self._streamed.wait()
                self._streamed.forget()
                with self._moves:
                    moved = move(*args, **kwargs)
                if loads:
                    self._streamed.pin(memory_management)
                return moved

            return moving

        for name in ("free_memory", "load_models_gpu"):
            if (move := getattr(memory_management, name, None)) is not None:
                moving = pinned(move, name == "load_models_gpu")
                self._replace(memory_management, patches, name, "moved", moving)

    def _put_back(self, memory_management: Any) -> None:
        """Put the host's functions back where a replacement has outlived its job.

        Another extension may have replaced it in turn, and have put it back after the job. Each job
        would ask for memory once more than the one before.
        """
        originals = {made: own for own, made in self._made.values()}
        for name, _ in self._made:
            own = found = getattr(memory_management, name)
            while own in originals:
                own = originals[own]
            if own is not found:
                setattr(memory_management, name, own)

    def _replace(
        self,
        memory_management: Any,
        patches: Patches,
        name: str,
        purpose: str,
        made: Callable[..., Any],
    ) -> None:
        """Put a replacement in a function's place: the last one for this function, or the new."""
        own, key = getattr(memory_management, name), (name, purpose)
        if key not in self._made or self._made[key][0] is not own:
            self._made[key] = own, made
        patches.set(memory_management, name, self._made[key][1])


def _parameters(model: nn.Module) -> list[nn.Parameter | None]:
    """As `nn.Module.parameters`, quickly: with None for absent ones, and shared ones twice."""
    found: list[nn.Parameter | None] = []
    waiting: list[nn.Module | None] = [model]
    while waiting:
        if (module := waiting.pop()) is not None:
            found += module._parameters.values()
            waiting += module._modules.values()
    return found
