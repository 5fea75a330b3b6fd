"""Puts our kernels into an exported block's graph."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch.fx import GraphModule, Node

from onediff_ext.backends.inductor.kernels import register_kernels
from onediff_ext.backends.inductor.kernels.fx_nodes import ATEN
from onediff_ext.backends.inductor.kernels.rewrite_8_bits import rewrite_8_bit_product
from onediff_ext.backends.inductor.kernels.rewrite_attention import rewrite_attention
from onediff_ext.backends.inductor.kernels.rewrite_biases import rewrite_joined_biases
from onediff_ext.backends.inductor.kernels.rewrite_geglu import rewrite_geglu
from onediff_ext.backends.inductor.kernels.rewrite_norms import (
    rewrite_group_norm,
    rewrite_layer_norm,
)
from onediff_ext.backends.inductor.kernels.rewrite_products import (
    rewrite_gelu_product,
    rewrite_joined_product,
    write_inputs_once,
)
from onediff_ext.backends.inductor.kernels.rewrite_rope import rewrite_rotated_pairs
from onediff_ext.backends.inductor.kernels.rewrite_slices import rewrite_sliced_sum
from onediff_ext.backends.inductor.kernels.simplify import (
    drop_cast_to_itself,
    drop_division_by_one,
    drop_dropout,
    name_inferred_size,
    swish_to_silu,
)
from onediff_ext.backends.inductor.kernels.written import register_lowering

_REWRITES: dict[object, Callable[[Node], None]] = {
    ATEN.div.Tensor: drop_division_by_one,
    ATEN.scaled_dot_product_attention.default: rewrite_attention,
    ATEN._int_mm.default: rewrite_8_bit_product,
    ATEN._scaled_mm.default: rewrite_8_bit_product,
    ATEN.mul.Tensor: rewrite_geglu,
    ATEN.group_norm.default: rewrite_group_norm,
    ATEN.layer_norm.default: rewrite_layer_norm,
    ATEN.gelu.default: rewrite_gelu_product,
    ATEN.linear.default: rewrite_joined_product,
    ATEN.slice.Tensor: rewrite_sliced_sum,
    ATEN.stack.default: rewrite_rotated_pairs,
}


def with_kernels(graph_module: GraphModule) -> GraphModule:
    """Return a copy of an exported graph that calls our kernels where they help."""
    register_kernels()
    register_lowering()
    rewritten = copy.deepcopy(graph_module)
    for node in list(rewritten.graph.nodes):
        if node.target is ATEN._assert_tensor_metadata.default:
            rewritten.graph.erase_node(node)  # it would count as a user of its input
    for node in list(rewritten.graph.nodes):
        drop_cast_to_itself(node)
        drop_dropout(node)
        swish_to_silu(node)
        name_inferred_size(node)
    for node in list(rewritten.graph.nodes):
        if node.target is ATEN._scaled_mm.default:
            rewrite_joined_biases(node)
    for node in list(rewritten.graph.nodes):
        if node.op == "call_function" and (rewrite := _REWRITES.get(node.target)):
            rewrite(node)
    for node in list(rewritten.graph.nodes):
        if node.target in (ATEN.linear.default, ATEN._addmm_activation.default):
            write_inputs_once(node)
    rewritten.graph.eliminate_dead_code()
    rewritten.recompile()
    return rewritten
