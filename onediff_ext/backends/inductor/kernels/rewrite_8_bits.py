"""Products in 8 bits: the kernel that computes their rows also writes them in 8 bits."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from onediff_ext.backends.inductor.code_choices import MOST_CHANNELS
from onediff_ext.backends.inductor.kernels.fx_nodes import ATEN
from onediff_ext.backends.inductor.kernels.rewrite_activated import activated_rows

_RESHAPES = (ATEN.reshape.default, ATEN.view.default)


def rewrite_8_bit_product(node: Any) -> None:
    """Replace the quantization of an 8-bit product's rows.

    `quantize_rows` of the engine traces it as: reshape, to float32, division by the scale,
    rounding, and the cast.
    """
    cast = node.args[0]
    division, steps = cast, 0
    while division.target is not ATEN.div.Tensor:
        division, steps = division.args[0], steps + 1
        if steps > 4 or not isinstance(division, Node):
            return
    wide, scale = division.args
    reshaped = wide.args[0] if wide.target is ATEN.to.dtype else wide
    if reshaped.target not in _RESHAPES:
        return
    x = reshaped.args[0]
    if x.meta["val"].ndim != 3 or x.meta["val"].shape[-1] > MOST_CHANNELS:
        return
    alone = len(x.users) == 1 and (
        len(reshaped.users) == 1
        or all(user is division or user.target is ATEN.abs.default for user in reshaped.users)
    )
    dtype = cast.meta["val"].dtype
    # In fp8 a LayerNorm's output has one scale for all rows; nothing else has.
    bounded = scale.meta["val"].ndim == 1
    normed = alone and bounded == (dtype is not torch.int8)
    source = x.args[0] if x.target is operator.getitem else None
    with cast.graph.inserting_before(cast):
        if normed and x.target is torch.ops.onediff.layer_norm.default:
            both = cast.graph.call_function(
                torch.ops.onediff.layer_norm_in_8_bits.default, (*x.args[:4], dtype)
            )
        elif (
            normed
            and source is not None
            and source.target is torch.ops.onediff.add_layer_norm.default
        ):
            with cast.graph.inserting_before(source):
                both = cast.graph.call_function(
                    torch.ops.onediff.add_layer_norm_in_8_bits.default, (*source.args[:5], dtype)
                )
                total = cast.graph.call_function(operator.getitem, (both, 0))
            total.meta["val"] = source.meta["val"][0]
            for user in list(source.users):
                if user is not x:
                    user.replace_all_uses_with(total)
        elif bounded:
            return
        elif alone and (activated := activated_rows(x, dtype)):
            both = activated
        elif x.meta["val"].shape[-1] > 8192 or (alone and x.target is ATEN.gelu.default):
            return  # Inductor fuses what comes before with it
        elif alone and x.target is torch.ops.onediff.geglu.default:
            both = cast.graph.call_function(
                torch.ops.onediff.geglu_in_8_bits.default, (*x.args, dtype)
            )
        else:
            both = cast.graph.call_function(torch.ops.onediff.rows_in_8_bits.default, (x, dtype))
        first = 1 if both.target is torch.ops.onediff.add_layer_norm_in_8_bits.default else 0
        int8_rows = cast.graph.call_function(operator.getitem, (both, first))
        scales = cast.graph.call_function(operator.getitem, (both, first + 1))
    int8_rows.meta["val"], scales.meta["val"] = cast.meta["val"], scale.meta["val"]
    cast.replace_all_uses_with(int8_rows)
    for user in list(scale.users):
        if user is not division:
            user.replace_input_with(scale, scales)
