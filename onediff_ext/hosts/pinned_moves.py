"""Moves of models between main memory and a GPU, through pinned memory.

Hosts for small GPUs move models in and out at each phase of a picture. From ordinary main memory a
GPU is fed at a fraction of the bus's speed, and each move back allocates all of the memory again.
With SDXL in 8 GB, such moves were more than half of a picture's time in A1111 and in Forge Neo.

torch's allocator of pinned memory keeps what is freed. So pinning itself, which is slow, costs time
only once, and that is spread over several moves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from onediff_ext.engine.patches import Patches
from onediff_ext.engine.torch_versions import empty_pinned_cache

logger = logging.getLogger(__name__)

# Main memory that has to stay free beside pinned weights, which cannot be swapped out.
SPARE_BYTES = 3 * 2**30

# So much is pinned before free main memory is asked for again. Pinned memory that torch has kept
# takes none of it.
CHUNK_BYTES = 2**30

# So long one move may pin memory; what is left then moves as it would by itself.
PINNING_LIMIT_S = 0.4

# Smaller tensors gain nothing, and each would take a page and a call of the driver.
MIN_BYTES = 2**16

_TO = torch._C.TensorBase.to

# Functions that neither read nor write numbers, by name. `nn.Module.to` calls them.
_TOUCH_NO_NUMBERS = frozenset(
    (
        "__get__",  # of properties
        "__set__",  # ``weight.data = moved`` takes another memory, and leaves both as they are
        "_has_compatible_shallow_copy_type",
        "_parse_to",
        "_set_grad_enabled",
        "element_size",
        "is_complex",
        "is_floating_point",
        "is_pinned",
        "numel",
    )
)


class PinnedMoves(TorchFunctionMode):
    """In the ``with`` block, tensors that move from a GPU to main memory get pinned memory there.

    All else about it is as without this class: each move makes a new tensor. A move to main memory
    has copied all numbers when it returns, so it does not matter who reads or writes weights in
    between. From pinned memory the way back to the GPU is fast, too.

    On the way to a GPU, Python goes on with the next tensor while the GPU reads. Every other
    function that could read or write numbers waits for the GPU first, and so does the end of the
    outermost ``with`` block.

    Args:
        available_bytes: Returns how much main memory can be used without swapping.
    """

    def __init__(self, available_bytes: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._available_bytes = available_bytes or main_memory_available
        self._is_off = False
        self._room_bytes = 0
        self._depth = 0  # of ``with`` blocks
        self._pinning_s = 0.0  # within the outermost one
        self._reading: set[torch.device] = set()  # GPUs that may still read main memory

    def __enter__(self) -> PinnedMoves:
        if self._depth == 0:
            self._pinning_s = 0.0
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        self._depth -= 1
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        if not self._depth:
            self._wait()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do what was called, or the same with pinned memory."""
        kwargs = kwargs or {}
        if func is _TO and (gpu := _gpu_it_moves_to(*args, **kwargs)) is not None:
            self._reading.add(gpu)
            return _TO(args[0], gpu, non_blocking=True)
        if self._reading and getattr(func, "__name__", "") not in _TOUCH_NO_NUMBERS:
            self._wait()
        if func is _TO and not self._is_off and _moves_out(*args, **kwargs):
            moved = self._pinned_copy(args[0].detach())
            if moved is not None:
                return moved
        return func(*args, **kwargs)

    def _wait(self) -> None:
        """Wait until GPUs have read what moves to them."""
        for device in self._reading:
            torch.cuda.synchronize(device)
        self._reading.clear()

    def pin(self, tensors: Iterable[torch.Tensor | None]) -> int:
        """Put tensors that stay in main memory into pinned memory, where a GPU reads them faster.

        Each keeps its identity and its numbers. Call it after the ``with`` block, where looking at
        many tensors is cheap. It takes what that block has left of `PINNING_LIMIT_S`; the rest of
        the tensors stays for a later call.

        Args:
            tensors: Of any kind. Those that are no plain ones in main memory, small ones, and
                views of a larger memory stay as they are. None is none.

        Returns:
            How many of them are pinned now.
        """
        pinned = 0
        for tensor in tensors:
            if not _could_be_pinned(tensor):
                continue
            if tensor.is_pinned():
                pinned += 1
                continue
            # A parameter stays one of inference mode, or one of none.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                copied = None if self._is_off else self._pinned_copy(tensor.detach())
                if copied is not None:
                    tensor.data = copied
                    pinned += 1
        return pinned

    def _pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if self._pinning_s > PINNING_LIMIT_S:
            return None
        needed_bytes = 1 << (tensor.nbytes - 1).bit_length()  # as torch rounds it
        if self._room_bytes < needed_bytes:
            self._room_bytes = min(CHUNK_BYTES, self._available_bytes() - SPARE_BYTES)
            if self._room_bytes < needed_bytes:
                self._turn_off("main memory is short")
                return None
        self._room_bytes -= needed_bytes
        start_s = time.perf_counter()
        try:
            moved = torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError as error:
            self._turn_off(str(error).partition("\n")[0])
            return None
        self._pinning_s += time.perf_counter() - start_s
        return moved.copy_(tensor)

    def _turn_off(self, reason: str) -> None:
        self._is_off = True
        logger.warning("Models are moved without pinned memory from now on: %s", reason)
        empty_pinned_cache()


def use_pinned_memory(moves: PinnedMoves, patches: Patches, models: Iterable[nn.Module]) -> None:
    """Have models moved through pinned memory. Models that are already stay as they are.

    Args:
        moves: Decides whether there is enough main memory.
        patches: Undoes it. Models stay where they are then.
        models: The host moves each as a whole. One with a ``to`` of somebody else keeps that.
    """
    for model in models:
        if "to" not in vars(model):
            patches.set(model, "to", _through(moves, model))


def _through(moves: PinnedMoves, module: nn.Module) -> Callable[..., nn.Module]:
    def to(*args: Any, **kwargs: Any) -> nn.Module:
        with moves:
            moved: nn.Module = type(module).to(module, *args, **kwargs)
        return moved

    return to


def main_memory_available() -> int:
    """Return the bytes of main memory that can be used without swapping; 0 if nothing tells."""
    try:
        import psutil  # a dependency of the hosts that move models
    except ImportError:
        return 0
    return int(psutil.virtual_memory().available)


def is_in_pinned_memory(tensor: torch.Tensor | None) -> bool:
    """Return whether `PinnedMoves` may have put a tensor where it lies.

    Args:
        tensor: Of any kind. None is none.
    """
    return _could_be_pinned(tensor) and tensor.is_pinned()


def _could_be_pinned(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return (
        tensor is not None
        and type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.nbytes >= MIN_BYTES
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def _moves_out(tensor: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether ``tensor.to(...)`` moves a plain tensor to main memory and changes nothing else."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.device.type == "cuda"
        and tensor.layout is torch.strided
        and tensor.nbytes >= MIN_BYTES
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and (device := device_it_moves_to(tensor.dtype, *args, **kwargs)) is not None
        and device.type == "cpu"
    )


def _gpu_it_moves_to(tensor: Any, *args: Any, **kwargs: Any) -> torch.device | None:
    """The GPU to which ``tensor.to(...)`` moves a plain tensor, if it changes nothing else."""
    if (
        type(tensor) not in (torch.Tensor, nn.Parameter)
        or tensor.device.type != "cpu"
        or tensor.layout is not torch.strided
    ):
        return None
    device = device_it_moves_to(tensor.dtype, *args, **kwargs)
    return device if device is not None and device.type == "cuda" else None


def device_it_moves_to(own_dtype: torch.dtype, *args: Any, **kwargs: Any) -> torch.device | None:
    """Return the device that these arguments of ``Tensor.to`` name, if they name no other change.

    Args:
        own_dtype: The tensor's.
        *args: As given to ``to``.
        **kwargs: Likewise.

    Returns:
        None for a change of the dtype or of the memory format, and without a device.
    """
    if args and not isinstance(args[0], (str, torch.device)):
        return None
    kwargs.pop("copy", None)  # a move copies anyway
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args[:3], **kwargs)
    changes = dtype not in (None, own_dtype) or (memory_format not in (None, torch.preserve_format))
    return None if changes else device
