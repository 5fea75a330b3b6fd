"""Moves of models between main memory and a GPU, through pinned memory.

Hosts for small GPUs move models in and out at each phase of a picture. From ordinary main memory a
GPU is fed at a fraction of the bus's speed, and each move back allocates all of the memory again.
With SDXL in 8 GB, such moves were more than half of a picture's time in A1111 and in Forge Neo.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from onediff_ext.engine.patches import Patches
from onediff_ext.hosts.pinned_memory import PINNED_MEMORY, PinnedMemory

GPU_TYPE = "cuda"

# Classes whose functions are torch's own.
_PLAIN = (torch.Tensor, nn.Parameter)

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
    thread's outermost ``with`` block.

    A function mode sees each function of each tensor, which costs Python's time. So `nn.Module.to`
    of this thread leaves the mode while it moves a module.

    Args:
        memory: Where pinned memory comes from.
    """

    def __init__(self, memory: PinnedMemory = PINNED_MEMORY) -> None:
        super().__init__()
        self._memory = memory
        self._here = _InThread()

    def __enter__(self) -> PinnedMoves:
        if not self._here.depth:
            self._memory.begin_move()
            _MODULE_MOVES.begin(self)
            super().__enter__()  # type: ignore[no-untyped-call]
        self._here.depth += 1
        return self

    def __exit__(self, *exc: Any) -> None:
        self._here.depth -= 1
        if not self._here.depth:
            super().__exit__(*exc)  # type: ignore[no-untyped-call]
            _MODULE_MOVES.end()
            try:
                self._wait()
            finally:
                self._memory.end_move()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do what was called, or the same with pinned memory."""
        kwargs = kwargs or {}
        if func is _TO and (gpu := _gpu_it_moves_to(*args, **kwargs)) is not None:
            if self._memory.holds(args[0]):
                return self._to_gpu(args[0], gpu)
            return func(*args, **kwargs)
        if self._here.streams and getattr(func, "__name__", "") not in _TOUCH_NO_NUMBERS:
            self._wait()
        if func is _TO and _moves_out(*args, **kwargs):
            moved = self._memory.copy(args[0].detach(), args[0].device)
            if moved is not None:
                return moved
        return func(*args, **kwargs)

    def move_module(self, module: nn.Module, device: torch.device) -> None:
        """Move all tensors of a module as `nn.Module.to` does, within the ``with`` block.

        Args:
            module: No module in it has an ``_apply`` of its own, which could do anything with
                tensors that the GPU still reads.
            device: Where to. Its tensors keep their dtypes and memory formats.
        """
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            copies = self._pinned_copies(module) if device.type == "cpu" else {}
            module._apply(  # type: ignore[no-untyped-call]
                lambda tensor: self._moved(tensor, device, copies)
            )
        finally:
            super().__enter__()  # type: ignore[no-untyped-call]

    def _to_gpu(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Move a tensor out of `PinnedMemory`, which keeps its memory while the GPU reads it."""
        moved = _TO(tensor, device, non_blocking=True)
        self._here.streams.add(_current_stream(moved.device))
        return moved

    def _moved(
        self,
        tensor: torch.Tensor,
        device: torch.device,
        copies: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        if (copied := copies.get(id(tensor))) is not None:
            return copied[1]
        if type(tensor) not in _PLAIN:
            self._wait()  # somebody's own class may do anything in its ``to``
        elif device.type == GPU_TYPE and _is_in_main_memory(tensor) and self._memory.holds(tensor):
            return self._to_gpu(tensor, device)
        return tensor.to(device)

    def _pinned_copies(self, module: nn.Module) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Copy what moves out. Nobody sees the copies before the GPU has written all of them.

        Returns:
            By the `id` of each of the module's tensors: the tensor, so that no other gets its `id`,
            and its copy.
        """
        self._wait()
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for inner in _modules(module):
            for tensor in (*inner._parameters.values(), *inner._buffers.values()):
                if tensor is None or not _is_on_gpu(tensor) or id(tensor) in copies:
                    continue
                if isinstance(tensor, nn.Parameter) or not _needs_gradient(tensor):
                    device = tensor.device
                    copied = self._memory.copy(tensor.detach(), device, non_blocking=True)
                    if copied is not None:
                        copies[id(tensor)] = tensor, copied
                        self._here.streams.add(_current_stream(device))
        self._wait()
        return copies

    def _wait(self) -> None:
        """Wait until GPUs have read and written main memory."""
        streams, self._here.streams = self._here.streams, set()
        for stream in streams:
            stream.synchronize()

    def pin(self, tensors: Iterable[torch.Tensor | None], device: torch.device) -> int:
        """Put tensors that stay in main memory into pinned memory, where a GPU reads them faster.

        Each keeps its identity and its numbers. Call it after the ``with`` block, where looking at
        many tensors is cheap. It takes what that block has left of the time for pinning; the rest
        of the tensors stays for a later call.

        Args:
            tensors: Of any kind. Those that are no plain ones in main memory stay as they are, and
                so do views of a larger memory and those that share one. None is none.
            device: The GPU that reads them.

        Returns:
            How many of them are pinned now.
        """
        plain = {id(tensor): tensor for tensor in tensors if _could_be_pinned(tensor)}
        shared = Counter(tensor.data_ptr() for tensor in plain.values())
        pinned = 0
        for tensor in plain.values():
            if tensor.is_pinned():
                pinned += 1
            elif shared[tensor.data_ptr()] == 1:
                # A parameter stays one of inference mode, or one of none.
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    copied = self._memory.copy(tensor.detach(), device)
                    if copied is not None:
                        tensor.data = copied
                        pinned += 1
        return pinned


class _InThread(threading.local):
    """What one thread does in ``with`` blocks of a `PinnedMoves`.

    Attributes:
        depth: In how many of them it is.
        streams: Of GPUs that may still read or write main memory for it.
    """

    depth = 0

    def __init__(self) -> None:
        self.streams: set[torch.cuda.Stream] = set()


class _ModuleMoves:
    """`nn.Module.to` of threads that are within a ``with`` block of `PinnedMoves`.

    It replaces torch's own while any thread is within such a block. Other threads, and all other
    calls than plain moves, get torch's own.
    """

    def __init__(self) -> None:
        # Garbage may be collected with the lock held, and then move a model.
        self._lock = threading.RLock()
        self._blocks = 0  # of all threads
        self._before = self._replacement = nn.Module.to
        self._of_thread = threading.local()

    def begin(self, moves: PinnedMoves) -> None:
        """Note that this thread enters a block of `moves`."""
        with self._lock:
            if not self._blocks:
                self._before = nn.Module.to
                self._replacement = self._instead_of(nn.Module.to)
                nn.Module.to = self._replacement  # type: ignore[method-assign]
            self._blocks += 1
        self._within().append(moves)

    def end(self) -> None:
        """Note that this thread leaves its innermost block."""
        self._within().pop()
        with self._lock:
            self._blocks -= 1
            # Where another extension has replaced it in turn, it stays, and does what was there.
            if not self._blocks and nn.Module.to is self._replacement:
                nn.Module.to = self._before  # type: ignore[method-assign]

    def _within(self) -> list[PinnedMoves]:
        """The blocks of this thread, outermost first."""
        blocks: list[PinnedMoves] = vars(self._of_thread).setdefault("blocks", [])
        return blocks

    def _instead_of(self, before: Callable[..., nn.Module]) -> Any:
        @functools.wraps(before)
        def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            device = args[0] if len(args) == 1 else kwargs.get("device") if not args else None
            if (
                isinstance(device, (str, torch.device))
                and kwargs.keys() <= {"device", "non_blocking"}
                and (blocks := self._within())
                and blocks[-1] is _get_current_function_mode()  # type: ignore[no-untyped-call]
                and all(map(_is_moved_by_torch, _modules(module)))
            ):
                with contextlib.suppress(NotImplementedError):  # on "meta": torch says what to do
                    blocks[-1].move_module(module, torch.device(device))
                    return module
            return before(module, *args, **kwargs)

        return to


_MODULE_MOVES = _ModuleMoves()


def _current_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.current_stream(device)


def _modules(module: nn.Module) -> Iterable[nn.Module]:
    return module.modules() if module._modules else (module,)


def _is_moved_by_torch(module: nn.Module) -> bool:
    return type(module)._apply is nn.Module._apply and "_apply" not in vars(module)


def use_pinned_memory(moves: PinnedMoves, patches: Patches, models: Iterable[nn.Module]) -> None:
    """Have models moved through pinned memory. Models that are already stay as they are.

    Args:
        moves: Decides whether there is enough main memory.
        patches: Undoes it. Models stay where they are then.
        models: The host moves each as a whole. One with a ``to`` of somebody else keeps that.
    """
    for model in models:
        if "to" not in vars(model):
            # Bound, so that a copy of the model moves itself.
            patches.set(model, "to", MethodType(_through(moves), model))


def _through(moves: PinnedMoves) -> Callable[..., nn.Module]:
    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        with moves:
            moved: nn.Module = type(module).to(module, *args, **kwargs)
        return moved

    return to


def is_in_pinned_memory(tensor: torch.Tensor | None) -> bool:
    """Return whether `PinnedMoves` may have put a tensor where it lies.

    Args:
        tensor: Of any kind. None is none.
    """
    return _could_be_pinned(tensor) and tensor.is_pinned()


def _could_be_pinned(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return (
        tensor is not None
        and type(tensor) in _PLAIN
        and _is_in_main_memory(tensor)
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def _moves_out(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """Whether ``tensor.to(...)`` moves a plain tensor to main memory and changes nothing else."""
    return (
        _is_on_gpu(tensor)
        and not _needs_gradient(tensor)
        and (device := device_it_moves_to(tensor.dtype, *args, **kwargs)) is not None
        and device.type == "cpu"
    )


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor has numbers of torch's own kind there."""
    return tensor.is_cuda and type(tensor) in _PLAIN and _has_plain_numbers(tensor)


def _has_plain_numbers(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.nbytes > 0
    )


def _needs_gradient(tensor: torch.Tensor) -> bool:
    """Whether torch notes how a copy was made. `nn.Module.to` notes it for buffers only."""
    return tensor.requires_grad and torch.is_grad_enabled()


def _gpu_it_moves_to(tensor: Any, *args: Any, **kwargs: Any) -> torch.device | None:
    """The GPU to which ``tensor.to(...)`` moves a plain tensor, if it changes nothing else."""
    if type(tensor) not in _PLAIN or not _is_in_main_memory(tensor):
        return None
    device = device_it_moves_to(tensor.dtype, *args, **kwargs)
    return device if device is not None and device.type == GPU_TYPE else None


def _is_in_main_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and _has_plain_numbers(tensor)


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
