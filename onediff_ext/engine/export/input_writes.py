"""Blocks that write into their own arguments, which no graph may do.

A graph's first outputs are compared with eager's, which would then read what the graph has written.
And a graph may get a copy of an argument, so that what reads it afterwards misses the write.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from onediff_ext.core.errors import ExportError


def check_input_writes(program: torch.export.ExportedProgram) -> None:
    """Check that a program writes into none of its inputs.

    Args:
        program: As traced, its operators not yet decomposed.

    Raises:
        ExportError: An operator writes into an input, or into a view of one.
    """
    for node in program.graph.nodes:
        for written in _written_by(node):
            if _source_of(written).op == "placeholder":
                raise ExportError(f"The block writes into its arguments ({node.target}).")


def _written_by(node: Node) -> Iterator[Node]:
    schema = _schema_of(node)
    if schema is None or not schema.is_mutable:
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(given, Node):
                yield given


def _source_of(node: Node) -> Node:
    """The node whose memory this one's value lies in."""
    while node.args and isinstance(node.args[0], Node) and _is_view(node):
        node = node.args[0]
    return node


def _is_view(node: Node) -> bool:
    schema = _schema_of(node)
    if schema is None:
        return node.target is operator.getitem  # of the views that `chunk` returns
    if all(returned.alias_info is None for returned in schema.returns):
        return False
    before: Any = node.args[0]
    # Where it converts, `to` returns a new tensor.
    is_conversion = str(node.target).startswith("aten.to.")
    return not is_conversion or before.meta["val"].dtype == node.meta["val"].dtype


def _schema_of(node: Node) -> Any:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None
