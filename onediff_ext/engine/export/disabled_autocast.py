"""Regions without autocast inside of a block: an export makes graphs of their own of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule


def inline_disabled_autocast(graph_module: GraphModule) -> None:
    """Put the operators of regions under ``torch.autocast(enabled=False)`` into the graph itself.

    Such a region is a call of another graph. Inductor computes it but cannot save it: Z-Image's
    RoPE has one. Casts of an autocast around it are operators of the graph already, so the region
    needs no context.

    Args:
        graph_module: Of an exported program; changed in place.
    """
    graph, found = graph_module.graph, False
    for node in list(graph.nodes):
        if node.target is not torch.ops.higher_order.wrap_with_autocast or node.args[2]:
            continue
        found = True
        region, inputs = getattr(graph_module, node.args[4].target), node.args[5:]
        inline_disabled_autocast(region)
        places = [n for n in region.graph.nodes if n.op == "placeholder"]
        with graph.inserting_before(node):
            outputs: Any = graph.graph_copy(region.graph, dict(zip(places, inputs, strict=True)))
        for user in list(node.users):  # each takes one of the outputs
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    if found:
        graph.eliminate_dead_code()
        graph_module.delete_all_unused_submodules()
        graph_module.recompile()
