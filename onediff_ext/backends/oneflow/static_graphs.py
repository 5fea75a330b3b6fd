"""OneFlow's static graphs of this process: one for each program and exact shape, bounded.

OneFlow 0.9 has three habits that decide what this file does:
- A graph that is dropped keeps its memory until *all* graphs are dropped and the session is
  reset, and a reset with one of them alive ends the process.
- After a graph that could not be planned, the next one that is planned ends the process.
- A missing kernel is an ordinary error when an operator runs by itself. So a program runs
  operator by operator first, at each new shape, and what the plan gives is compared with that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onediff_ext.backends.oneflow import tensor_exchange
from onediff_ext.backends.oneflow.flow_errors import one_line
from onediff_ext.backends.oneflow.program import FlowProgram
from onediff_ext.core.errors import BackendError, MachineError
from onediff_ext.engine.checking.compare_with_eager import compare

logger = logging.getLogger(__name__)

# One size of one picture needs about 15 graphs for a UNet and 15 for a VAE.
# Each has three threads of its own.
LIMIT_COUNT = 256
LIMIT_BYTES_CPU = 4 * 2**30
_GPU_SHARE = 3  # a third of the GPU's memory
# A graph takes 1.1 to 1.5 times what its tensors take (seen on a CPU).
_OVERHEAD = 1.5
_EMPTY_BYTES = 4 * 2**20
# Graphs called less often than this before they had to go did not pay.
_WORTH_CALLS = 3

_Key = tuple[int, tuple[Any, ...]]


@dataclass(eq=False)
class _Plan:
    graph: Any
    size_bytes: int
    calls: int = 0


class Plans:
    """Makes, keeps and runs the graphs.

    Args:
        flow: The `oneflow` module.
        limit_count: Most graphs alive.
        limit_bytes: Most memory that they take together; None goes by the device.

    Attributes:
        broken: Why this process makes no graph any more, or None.
        resets: How often everything was dropped.
    """

    def __init__(
        self, flow: Any, limit_count: int = LIMIT_COUNT, limit_bytes: int | None = None
    ) -> None:
        self._flow, self._limit_count, self._limit_bytes = flow, limit_count, limit_bytes
        self._plans: dict[_Key, _Plan] = {}
        self._wasted: set[_Key] = set()  # dropped before they had paid
        # One call at a time: a reset must not meet a graph that another thread is running.
        self._lock = threading.RLock()
        self.broken: str | None = None
        self.resets = 0

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def size_bytes(self) -> int:
        """Memory of all graphs together, estimated from the shapes of their tensors."""
        return sum(plan.size_bytes for plan in self._plans.values())

    def run(self, program: FlowProgram, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run a program on torch tensors, by a graph that is made if there is none.

        Raises:
            BackendError: No graph can be made for these shapes.
            MachineError: For no fault of the program's: no room, or an earlier failure.
        """
        with self._lock:
            tensor_exchange.wait_for_torch(tensors[-1].device)
            permuted = tuple(map(tensor_exchange.is_permuted, tensors))
            shapes = tuple((t.shape, t.dtype, t.device) for t in tensors)
            key = (program.number, (permuted, shapes))
            plan = self._plans.get(key)
            if plan is None:
                return self._first_run(key, program, tensors, permuted)
            plan.calls += 1
            return tensor_exchange.to_torch(self._flow, plan.graph(*self._as_flow(tensors)))

    def drop_all(self) -> bool:
        """Drop every graph and give their memory back.

        Returns:
            False when graphs of somebody else are alive, so that nothing can be given back.
        """
        with self._lock:
            self._plans.clear()
            gc.collect()
            if any(issubclass(type(thing), self._flow.nn.Graph) for thing in gc.get_objects()):
                return False
            self._flow.framework.session_context.GetDefaultSession().Reset()
            _give_back_freed_memory()
            self.resets += 1
            return True

    def _first_run(
        self,
        key: _Key,
        program: FlowProgram,
        tensors: Sequence[torch.Tensor],
        permuted: Sequence[bool],
    ) -> torch.Tensor:
        if self.broken is not None:
            raise MachineError(self.broken)
        self._make_room(key, tensors[-1].device)
        flow, arguments = self._flow, self._as_flow(tensors)

        def forward(values: Sequence[Any]) -> Any:
            return program.run(
                flow,
                [
                    tensor_exchange.restore_order(value) if is_permuted else value
                    for value, is_permuted in zip(values, permuted, strict=True)
                ],
            )

        try:
            expected = tensor_exchange.to_torch(flow, forward(arguments)).clone()
        except BackendError:
            raise
        except Exception as exc:  # OneFlow raises several unrelated types
            raise BackendError(one_line(exc)) from None
        try:
            graph = _make_graph(flow, forward)
            found = tensor_exchange.to_torch(flow, graph(*arguments))
        except Exception as exc:
            self.broken = (
                f"OneFlow could not plan a graph ({one_line(exc)}) "
                "and makes no more until the next start"
            )
            raise MachineError(self.broken) from None
        comparison = compare(found, expected)
        if comparison.problem is not None:
            raise BackendError(f"OneFlow's graph {comparison.problem}, operator by operator")
        self._plans[key] = _Plan(graph, _size_bytes(graph), calls=1)
        return found

    def _as_flow(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        try:
            return [tensor_exchange.to_flow(self._flow, tensor) for tensor in tensors]
        except Exception as exc:
            raise BackendError(f"OneFlow cannot take these tensors ({one_line(exc)})") from None

    def _make_room(self, key: _Key, device: torch.device) -> None:
        limit_bytes = self._limit_bytes or _limit_bytes(device)
        if len(self._plans) < self._limit_count and self.size_bytes < limit_bytes:
            return
        count = len(self._plans)
        unpaid = {known for known, plan in self._plans.items() if plan.calls < _WORTH_CALLS}
        if key in self._wasted and 2 * len(unpaid & self._wasted) > count:
            # What one picture needs does not fit: it would be planned anew at each step.
            # The kind that asks runs eager, which leaves the room to the others.
            raise MachineError(
                f"OneFlow's graphs for this size do not fit: {self._limit_count} graphs "
                f"and {limit_bytes / 2**30:.1f} GB are the limit"
            )
        self._wasted |= unpaid
        if not self.drop_all():
            raise MachineError("OneFlow's memory is full of another program part's graphs")
        logger.info("OneFlow: dropped %d graphs to make room", count)


def _make_graph(flow: Any, forward: Any) -> Any:
    class OneDiffGraph(flow.nn.Graph):  # type: ignore[misc]
        def build(self, *values: Any) -> Any:
            return forward(values)

    return OneDiffGraph()


def _size_bytes(graph: Any) -> int:
    """What a graph's tensors take, from the shapes in its job; inputs have a copy in it."""
    from oneflow.core.common import data_type_pb2

    sizes = {
        data_type_pb2.kDouble: 8,
        data_type_pb2.kInt64: 8,
        data_type_pb2.kFloat16: 2,
        data_type_pb2.kBFloat16: 2,
    }
    total = 0
    for blob in graph._full_job_proto.helper.lbn2logical_blob_desc.values():
        elements = 1
        for size in blob.shape.dim:
            elements *= size
        total += elements * sizes.get(blob.data_type, 4)
    return _EMPTY_BYTES + int(_OVERHEAD * total)


def _give_back_freed_memory() -> None:
    """Without it half of what a reset frees on a CPU stays with the C library, for nobody."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _limit_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // _GPU_SHARE
    return LIMIT_BYTES_CPU


@functools.cache
def process_plans() -> Plans:
    """The graphs of this process. OneFlow is imported here for the first time."""
    import oneflow

    return Plans(oneflow)
