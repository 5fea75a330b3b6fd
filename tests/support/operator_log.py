"""Logs the operators that a function runs and the storages that they touch, and replays them.

The log keeps storages that were allocated within the function. It does not keep others alive: a
replay reads NaN from a storage that was freed or moved, since its memory would have another owner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.graph_calls import GraphObserver

# Operators that a CUDA graph cannot contain: the CPU would have to wait for the GPU, or the same
# random numbers would come out of each replay.
_REFUSED = {
    torch.Tag.nondeterministic_seeded: "random numbers are drawn",
    torch.Tag.data_dependent_output: "operation not permitted when stream is capturing",
    torch.Tag.dynamic_output_shape: "operation not permitted when stream is capturing",
}


@dataclass(eq=False)
class _Place:
    """A tensor: the number of its storage, and its layout in the storage.

    A log has one for each layout of a storage, so they are compared by identity.
    """

    storage: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def within(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.strides)


@dataclass(eq=False)
class _Storage:
    """One storage that was touched.

    Args:
        own: Whether it was allocated within the recording.
        weak: A weak reference to it.
        address: Its address when it was met.
        size_bytes: Its size when it was met.
        device: Where it is.
        kept: The storage itself, if the recording owns it and it outlived the function.
        before: The content of a foreign storage before the recording wrote into it.
    """

    own: bool
    weak: StorageWeakRef
    address: int
    size_bytes: int
    device: torch.device
    kept: torch.UntypedStorage | None = None
    before: torch.UntypedStorage | None = None


@dataclass(eq=False)
class _Call:
    """One operator: its arguments, with `_Place` for tensors, and the places of its new results."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[_Place | None, ...]  # None: the operator wrote the result in place

    def __post_init__(self) -> None:
        nested = (_Place, tuple, list, dict)
        self.is_flat = not self.kwargs and all(
            type(value) is _Place or not isinstance(value, nested) for value in self.args
        )

    def run(self, find: Callable[[_Place], torch.Tensor]) -> Any:
        """Run the operator with the tensors that `find` returns."""
        if self.is_flat:
            return self.function(*[find(v) if type(v) is _Place else v for v in self.args])
        return self.function(*_each_place(find, self.args), **_each_place(find, self.kwargs))


class OperatorLog(TorchDispatchMode, GraphObserver):
    """Runs operators and logs them.

    A graph is logged as one operator, since the dispatcher sees no operators of a compiled graph.
    """

    observes_only = True

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[_Storage] = []
        self._numbers: dict[int, int] = {}
        self._places: dict[tuple[Any, ...], _Place] = {}
        self._calls: list[_Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (reason := _refusal(func)) and not _is_permitted(func, args, kwargs):
            raise RuntimeError(f"{reason} ({func})")
        self._before_writing(func, args, kwargs)
        output = func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:  # the value of a constant
            number = self._number(output, own=True)
            self._storages[number].kept = output.untyped_storage()
            return output
        self.add(func, args, kwargs, output)
        return output

    def call(self, graph: Graph, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with _disable_current_modes():
            outputs = graph(arguments)
        self.add(lambda *tensors: graph(list(tensors)), tuple(arguments), {}, outputs)
        return outputs

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Log an operator that has run."""
        place = lambda tensor: self._place(tensor, own=False)  # noqa: E731
        places = _each_tensor(place, args), _each_tensor(place, kwargs)
        known = len(self._storages)
        results = []
        for leaf in _leaves(output):
            if isinstance(leaf, torch.Tensor):
                result = self._place(leaf, own=True)
                results.append(result if result.storage >= known else None)
        schema = getattr(func, "_schema", None)
        if any(results) or schema is None or schema.is_mutable:  # else a view
            self._calls.append(_Call(func, *places, tuple(results)))

    def _before_writing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not func._schema.is_mutable:
            return
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            for tensor in pytree.tree_leaves(given):
                if not isinstance(tensor, torch.Tensor):
                    continue
                storage = self._storages[self._number(tensor, own=False)]
                if not storage.own and storage.before is None:
                    with _disable_current_modes():
                        storage.before = tensor.untyped_storage().clone()

    def _number(self, tensor: torch.Tensor, *, own: bool) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self._storages)
            weak = StorageWeakRef(storage)  # keeps the number from being used again
            self._storages.append(
                _Storage(own, weak, storage.data_ptr(), storage.nbytes(), storage.device)
            )
        return number

    def _place(self, tensor: torch.Tensor, *, own: bool) -> _Place:
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise RuntimeError("a tensor that is no plain one")
        number = self._number(tensor, own=own)
        layout = (number, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        return self._places.setdefault(layout, _Place(*layout))

    def put_back(self) -> None:
        """Restore the foreign storages that the recording wrote into."""
        for storage in self._storages:
            alive = alive_storage(storage.weak)
            if storage.before is not None and alive is not None:
                alive.copy_(storage.before)
            storage.before = None

    def close(self) -> list[StorageWeakRef]:
        """Keep the recording's own storages that are still alive, overwritten with NaN.

        Returns:
            Weak references to these storages.
        """
        left = []
        for storage in self._storages:
            if storage.own and storage.kept is None:
                storage.kept = alive_storage(storage.weak)
                if storage.kept is not None:
                    spoil(storage.kept)
                    left.append(storage.weak)
        return left

    def replay(self) -> int:
        """Run the operators again.

        Returns:
            Number of foreign storages that were freed or moved.
        """
        memory: dict[int, torch.UntypedStorage] = {}
        tensors: dict[_Place, torch.Tensor] = {}
        freed = 0

        def find(place: _Place) -> torch.Tensor:
            nonlocal freed
            tensor = tensors.get(place)
            if tensor is None:
                if place.storage not in memory:
                    memory[place.storage], missing = self._memory_of(place.storage)
                    freed += missing
                tensor = tensors[place] = place.within(memory[place.storage])
            return tensor

        with _plainly():
            for call in self._calls:
                output = call.run(find)
                found = [x for x in _leaves(output) if isinstance(x, torch.Tensor)]
                for place, result in zip(call.results, found, strict=True):
                    if place is not None:
                        _keep(result, place, find, self._storages, memory, tensors)
        return freed

    def _memory_of(self, number: int) -> tuple[torch.UntypedStorage, bool]:
        storage = self._storages[number]
        found = storage.kept if storage.own else alive_storage(storage.weak)
        if found is not None and (
            storage.own
            or (found.data_ptr(), found.nbytes()) == (storage.address, storage.size_bytes)
        ):
            return found, False
        made = torch.UntypedStorage(storage.size_bytes, device=storage.device)
        spoil(made)
        return made, not storage.own


@functools.cache
def _refusal(func: Any) -> str:
    """Why this operator is refused, unless a call of it is permitted; else empty."""
    return next((reason for tag, reason in _REFUSED.items() if tag in func.tags), "")


def _is_permitted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operator with one of these tags may be recorded all the same."""
    if func is torch.ops.aten.index.Tensor:  # only masks have to be counted first
        counted = (torch.bool, torch.uint8)
        return all(index is None or index.dtype not in counted for index in args[1])
    return _drops_nothing(func, args, kwargs)


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator for dropout is called with probability 0 or outside of training."""
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    given |= {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    chances = [given[name] for name in ("p", "dropout_p") if name in given]
    return chances == [0] or given.get("train", given.get("training")) is False


def _keep(
    result: torch.Tensor,
    place: _Place,
    find: Callable[[_Place], torch.Tensor],
    storages: Sequence[_Storage],
    memory: dict[int, torch.UntypedStorage],
    tensors: dict[_Place, torch.Tensor],
) -> None:
    """Store a result of a replay where the recording had it."""
    fits = (result.dtype, result.shape, result.stride(), result.storage_offset()) == (
        place.dtype,
        place.shape,
        place.strides,
        place.offset,
    ) and result.untyped_storage().nbytes() == storages[place.storage].size_bytes
    if storages[place.storage].kept is None and place.storage not in memory and fits:
        memory[place.storage], tensors[place] = result.untyped_storage(), result
    else:
        find(place).copy_(result)


def _leaves(output: Any) -> Sequence[Any]:
    return (output,) if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)


def _each_tensor(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Replace each tensor in an operator's arguments."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is tuple:
        return tuple([_each_tensor(change, v) for v in value])
    if value is None or type(value) in (int, float, bool):
        return value
    return pytree.tree_map_only(torch.Tensor, change, value) if value else value


def _each_place(find: Callable[[_Place], torch.Tensor], value: Any) -> Any:
    """Replace each `_Place` in an operator's arguments by its tensor."""
    if isinstance(value, _Place):
        return find(value)
    if type(value) is tuple:
        return tuple(_each_place(find, v) for v in value)
    if type(value) is list:
        return [_each_place(find, v) for v in value]
    if type(value) is dict:
        return {k: _each_place(find, v) for k, v in value.items()}
    return value


@contextmanager
def _plainly() -> Iterator[None]:
    """Run operators without any mode of the caller."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch._C.DisableTorchFunction())
        yield


def alive_storage(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage, or None after it was freed."""
    return torch.UntypedStorage._new_with_weak_ptr(weak.cdata)


def spoil(storage: torch.UntypedStorage) -> None:
    """Fill a storage with bytes that are NaN in every floating dtype."""
    with _plainly():
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(255)
