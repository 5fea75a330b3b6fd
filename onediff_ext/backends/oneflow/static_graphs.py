"""OneFlow's static graphs in this process: one for each program and exact shape, with limits.

Three properties of OneFlow 0.9 decide the design of this file:
- A dropped graph keeps its memory until *all* graphs are dropped and the session is reset. A
  reset with a graph alive crashes the process.
- After a graph that could not be planned, planning the next one crashes the process.
- A missing kernel is an ordinary error when an operator runs alone. So at each new shape a program
  first runs operator by operator, and the graph's output is compared with that result.
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
_GPU_SHARE = 3  # one third of the GPU's memory
# A graph takes 1.1 to 1.5 times the memory of its tensors (measured on a CPU).
_OVERHEAD = 1.5
_EMPTY_BYTES = 4 * 2**20
# Graphs with fewer calls than this before they were dropped did not pay off.
_WORTH_CALLS = 3

_Key = tuple[int, tuple[Any, ...]]


@dataclass(eq=False)
class _StaticGraph:
    graph: Any
    size_bytes: int
    calls: int = 0


class StaticGraphCache:
    """Plans, keeps and runs the graphs.

    Args:
        flow: The `oneflow` module.
        limit_count: Most graphs in memory.
        limit_bytes: Most memory of all graphs; None depends on the device.

    Attributes:
        broken: Why this process can plan no more graphs, or None.
        resets: How often all graphs were dropped.
    """

    def __init__(
        self, flow: Any, limit_count: int = LIMIT_COUNT, limit_bytes: int | None = None
    ) -> None:
        self._flow, self._limit_count, self._limit_bytes = flow, limit_count, limit_bytes
        self._graphs: dict[_Key, _StaticGraph] = {}
        self._wasted: set[_Key] = set()  # dropped before they paid off
        # One call at a time: a reset must not happen while another thread runs a graph.
        self._lock = threading.RLock()
        self.broken: str | None = None
        self.resets = 0

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def size_bytes(self) -> int:
        """Memory of all graphs in bytes, estimated from the shapes of their tensors."""
        return sum(graph.size_bytes for graph in self._graphs.values())

    def run(self, program: FlowProgram, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run a program on torch tensors through a graph, which is planned if it is missing.

        Raises:
            BackendError: No graph can be planned for these shapes.
            MachineError: No memory is left, or an earlier failure blocks this process.
        """
        with self._lock:
            tensor_exchange.wait_for_torch(tensors[-1].device)
            permuted = tuple(map(tensor_exchange.is_permuted, tensors))
            shapes = tuple((t.shape, t.dtype, t.device) for t in tensors)
            key = (program.number, (permuted, shapes))
            found = self._graphs.get(key)
            if found is None:
                return self._first_run(key, program, tensors, permuted)
            found.calls += 1
            return tensor_exchange.to_torch(self._flow, found.graph(*self._as_flow(tensors)))

    def drop_all(self) -> bool:
        """Drop all graphs and free their memory.

        Returns:
            False when other code's graphs are alive, so that no memory can be freed.
        """
        with self._lock:
            self._graphs.clear()
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
        self._graphs[key] = _StaticGraph(graph, _size_bytes(graph), calls=1)
        return found

    def _as_flow(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        try:
            return [tensor_exchange.to_flow(self._flow, tensor) for tensor in tensors]
        except Exception as exc:
            raise BackendError(f"OneFlow cannot take these tensors ({one_line(exc)})") from None

    def _make_room(self, key: _Key, device: torch.device) -> None:
        limit_bytes = self._limit_bytes or _limit_bytes(device)
        if len(self._graphs) < self._limit_count and self.size_bytes < limit_bytes:
            return
        count = len(self._graphs)
        unpaid = {known for known, graph in self._graphs.items() if graph.calls < _WORTH_CALLS}
        if key in self._wasted and 2 * len(unpaid & self._wasted) > count:
            # The graphs of one picture do not fit together, so each step would plan them again.
            # This kind runs eager and leaves the room to the others.
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
    """Return the bytes of a graph's tensors, from the shapes in its job, with copies of inputs."""
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
    """Return freed memory to the system; otherwise the C library keeps half of it on a CPU."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _limit_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // _GPU_SHARE
    return LIMIT_BYTES_CPU


@functools.cache
def process_graphs() -> StaticGraphCache:
    """Return the graphs of this process; the first call imports OneFlow."""
    import oneflow

    return StaticGraphCache(oneflow)
