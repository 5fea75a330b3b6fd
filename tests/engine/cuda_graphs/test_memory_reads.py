"""What a recording reads, and what of main memory it may read. The meta device stands for a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onediff_ext.core.errors import CaptureError
from onediff_ext.engine.cuda_graphs.memory_reads import MemoryReads, record_and_observe

GPU = torch.device("meta")
Function = Callable[[torch.Tensor], object]
Observe = Callable[..., MemoryReads]


@pytest.fixture(params=["inference mode", "no mode"])
def observe(request: pytest.FixtureRequest) -> Iterator[Observe]:
    with torch.inference_mode(request.param == "inference mode"):
        yield observed


def observed(function: Function, weight: torch.Tensor, is_streamed: bool = True) -> MemoryReads:
    places = {weight.untyped_storage().data_ptr()} if is_streamed else set[int]()
    with MemoryReads(GPU, places) as reads:
        function(weight)
    return reads


REPEATED: dict[str, Function] = {
    "a copy": lambda w: w.to(GPU, non_blocking=True),
    "a copy of the same dtype": lambda w: w.to(GPU, w.dtype, non_blocking=True),
    "into a tensor": lambda w: torch.empty_like(w, device=GPU).copy_(w, non_blocking=True),
    "of a detached one": lambda w: w.detach().to(GPU, non_blocking=True),
    "of its transpose": lambda w: w.t().to(GPU, non_blocking=True),
    "of another shape": lambda w: w.reshape(6).to(GPU, non_blocking=True),
    "a conversion": lambda w: w.to(GPU, torch.float64, non_blocking=True),
    "a conversion into a tensor": lambda w: torch.empty(
        2, 3, device=GPU, dtype=torch.bfloat16
    ).copy_(w, non_blocking=True),
    "numbers of the GPU": lambda w: w.to(GPU, non_blocking=True) * 2,
    "other numbers in main memory": lambda _: torch.ones(3) + 1,
}
DONE_ONCE: dict[str, Function] = {
    "a copy that is waited for": lambda w: w.to(GPU),
    "a conversion that is waited for": lambda w: w.to(GPU, torch.float64),
    "a conversion to 8 bits": lambda w: w.to(GPU, torch.float8_e4m3fn, non_blocking=True),
    "a conversion to whole numbers": lambda w: w.to(GPU, torch.int32, non_blocking=True),
    "a conversion in another shape": lambda w: torch.empty(
        4, 2, 3, device=GPU, dtype=torch.float64
    ).copy_(w, non_blocking=True),
    "a conversion in main memory": lambda w: w.to(torch.float64),
    "another order": lambda w: torch.empty(3, 2, device=GPU).t().copy_(w, non_blocking=True),
    "a part with gaps": lambda w: w[:, :2].to(GPU, non_blocking=True),
    "another memory format": lambda w: w[None, None].to(
        GPU, non_blocking=True, memory_format=torch.channels_last
    ),
    "a product": lambda w: torch.nn.functional.linear(torch.ones(1, 3), w),
    "a copy in another shape": lambda w: w.t().reshape(6),
    "a contiguous copy": lambda w: w.t().contiguous(),
    "a sum": lambda w: w + 1,
    "a copy in main memory": lambda w: w.clone(),
    "a number": lambda w: w.sum(),
    "a write": lambda w: w.mul_(2),
    "a copy into it": lambda w: w.copy_(torch.ones(2, 3)),
}


@pytest.mark.parametrize("name", REPEATED)
def test_what_each_replay_repeats(name: str, observe: Observe) -> None:
    weight = torch.ones(2, 3)
    reads = observe(REPEATED[name], weight)
    is_read = weight.untyped_storage().data_ptr() in reads.storages
    assert is_read == (name != "other numbers in main memory")


@pytest.mark.parametrize("name", DONE_ONCE)
def test_what_would_happen_once(name: str, observe: Observe) -> None:
    with pytest.raises(CaptureError, match="reads a weight in main memory"):
        observe(DONE_ONCE[name], torch.ones(2, 3))
    observe(DONE_ONCE[name], torch.ones(2, 3), is_streamed=False)


@pytest.mark.parametrize("name", ["a conversion", "a conversion into a tensor"])
def test_a_copy_is_converted_on_the_gpu(name: str) -> None:
    """torch would convert it in main memory, which a replay does not repeat."""
    seen: list[tuple[torch.dtype, torch.device]] = []

    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            seen.extend((made.dtype, each.device) for each in args if each is weight)
            return made

    weight = torch.ones(2, 3)
    with Seen():  # type: ignore[no-untyped-call]
        observed(REPEATED[name], weight)
    assert seen == [(weight.dtype, weight.device)]


@pytest.mark.parametrize("cause", ["refused", "no memory"])
def test_an_error_that_somebody_catches_ends_the_recording(cause: str) -> None:
    """Code of LoRAs writes errors to its log, and goes on with the weight as it is."""
    weight = torch.ones(2, 3)

    class Full(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if cause == "no memory" and func is torch.ops.aten.mul.Tensor:
                raise torch.OutOfMemoryError
            return func(*args, **(kwargs or {}))

    def forward() -> None:
        with contextlib.suppress(Exception):
            weight * 2 if cause == "refused" else torch.ones(1) * 2

    expected = CaptureError if cause == "refused" else torch.OutOfMemoryError
    places = {weight.untyped_storage().data_ptr()}
    recorder: Any = SimpleNamespace(record=lambda function, *_: function())
    with pytest.raises(expected), Full():  # type: ignore[no-untyped-call]
        record_and_observe(recorder, forward, MemoryReads(GPU, places))


class _OfAHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does nothing, within the recording's own mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("around", [contextlib.nullcontext, _OfAHost])
def test_a_graphs_own_operators_are_not_observed_and_the_next_ones_are(around: Any) -> None:
    weight, within, later = torch.ones(2), torch.ones(2), torch.ones(2)

    def graph(arguments: Any) -> list[torch.Tensor]:
        return [arguments[0] + within]

    def failing(arguments: Any) -> list[torch.Tensor]:
        raise RuntimeError("a graph failed")

    reads = MemoryReads(torch.device("cpu"))
    with reads, around():
        [found] = reads.call(graph, [weight])
        with pytest.raises(RuntimeError, match="a graph failed"):
            reads.call(failing, [weight])
        found + later
    assert set(reads.storages) == {
        tensor.untyped_storage().data_ptr() for tensor in (weight, later)
    }
