"""An exported block that OneFlow can run."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from onediff_ext.backends.oneflow.operator_table import ARITHMETIC, TABLE, Lowering
from onediff_ext.core.errors import BackendError

_NUMBERS = itertools.count()


class FlowProgram:
    """An exported block whose operators are all in OneFlow's table.

    Args:
        graph_module: Takes weights and inputs, flattened; returns a tuple of one tensor.

    Attributes:
        number: Unique in this process.

    Raises:
        BackendError: An operator is not in the table. OneFlow has not been called yet.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self.number = next(_NUMBERS)
        self._graph_module = graph_module
        outputs = graph_module.graph.output_node().args[0]
        if isinstance(outputs, (tuple, list)) and len(outputs) > 1:
            raise BackendError("OneFlow's graphs have one output")
        missing = sorted({name for node in graph_module.graph.nodes if (name := _missing(node))})
        if missing:
            raise BackendError(f"OneFlow has no operator for {', '.join(missing)}")

    def run(self, flow: Any, arguments: list[Any]) -> Any:
        """Run on OneFlow tensors, eager or of a graph under construction."""
        return _FlowInterpreter(self._graph_module, flow).run(*arguments)[0]


class _FlowInterpreter(Interpreter):
    def __init__(self, graph_module: GraphModule, flow: Any) -> None:
        super().__init__(graph_module)
        self._flow = flow
        self.extra_traceback = False

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        lowering = lowering_of(target)
        if lowering is None:
            return target(*args, **kwargs)
        return lowering(self._flow, *args, **kwargs)


def lowering_of(target: object) -> Lowering | None:
    """Return the table's entry for the target of a call, or None."""
    return TABLE.get(str(target)) if isinstance(target, torch._ops.OpOverload) else None


def _missing(node: Node) -> str | None:
    if node.op in ("placeholder", "output"):
        return None
    if node.op != "call_function":
        return f"{node.op} {node.target}"
    if node.target in ARITHMETIC or lowering_of(node.target) is not None:
        return None
    return (
        str(getattr(node.target, "__name__", node.target))
        if not isinstance(node.target, torch._ops.OpOverload)
        else str(node.target)
    )
