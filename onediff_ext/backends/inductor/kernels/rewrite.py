"""Puts our kernels into an exported block's graph.

Autocast computes norms in float32, and writes casts before and behind them. Our kernels compute in
float32 whatever they read and write, so that those casts are theirs.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ATEN = torch.ops.aten


def with_kernels(graph_module: GraphModule) -> GraphModule:
    """A copy of an exported graph that calls our kernels where they are of use."""

    rewritten = copy.deepcopy(graph_module)
    for node in list(rewritten.graph.nodes):
        if node.target is _ATEN._assert_tensor_metadata.default:
            rewritten.graph.erase_node(node)  # would count as a use of what it looks at
    for node in list(rewritten.graph.nodes):
        _drop_cast_to_itself(node)
        _drop_dropout(node)
        _swish(node)
    for node in list(rewritten.graph.nodes):
        if node.op == "call_function" and (rewrite := _REWRITES.get(node.target)):
            rewrite(node)
    rewritten.graph.eliminate_dead_code()
    rewritten.recompile()
    return rewritten


def _group_norm(node: Any) -> None:
    x, groups, weight, bias, *rest = _arguments(node, 6)
    value = x.meta["val"]
    if weight is None or bias is None or value.ndim != 4 or value.dtype not in _DTYPES:
        return
    eps = rest[0] if rest and rest[0] is not None else 1e-5
    last, rounded = node, True
    narrow = _cast_behind(last)
    if narrow is not None:
        last = narrow
    silu = _only_user(last, _ATEN.silu.default, _ATEN.silu_.default)
    if silu is not None:
        last = silu
        narrow = _cast_behind(last)
        if narrow is not None:
            last, rounded = narrow, False
    dtype = last.meta["val"].dtype
    # What others read too has to be computed whole.
    x, added = _split_added(_uncast(x)) if len(x.users) == 1 else (_uncast(x), None)
    arguments = (x, groups, _uncast(weight), _uncast(bias), eps, silu is not None, added)
    _replace(last, torch.ops.onediff.group_norm.default, (*arguments, dtype, rounded))


def _split_added(x: Any) -> tuple[Any, Any]:
    """Take what is the same for all pixels off an image: a time embedding, a convolution's bias.

    Normalisation takes it in for nothing, where a sum of its own would read and write the image.
    """
    added = None
    if _is_sum(x) and x.target is _ATEN.add.Tensor and len(x.users) == 1:
        image, other = x.args
        if _per_channel(other) and not _per_channel(image):
            x, added = image, other
    if x.target is _ATEN.conv2d.default and len(x.users) == 1:
        source, weight, bias, *rest = _arguments(x, 7)
        if bias is not None:
            with x.graph.inserting_before(x):
                plain = x.graph.call_function(
                    _ATEN.conv2d.default, (source, weight, None, *_without_trailing_none(rest))
                )
                column = x.graph.call_function(_ATEN.view.default, (bias, [1, -1, 1, 1]))
            plain.meta["val"] = x.meta["val"]
            column.meta["val"] = bias.meta["val"].view(1, -1, 1, 1)
            if added is None:
                return plain, column
            with x.graph.inserting_after(max(added, column, key=_place)):
                both = x.graph.call_function(_ATEN.add.Tensor, (added, column))
            both.meta["val"] = added.meta["val"]
            return plain, both
    return x, added


def _is_sum(node: Any) -> bool:
    return (
        node.target in (_ATEN.add.Tensor, _ATEN.add_.Tensor)
        and not node.kwargs
        and len(node.args) == 2
        and all(isinstance(argument, Node) for argument in node.args)
    )


def _per_channel(node: Any) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.ndim == 4
        and all(isinstance(size, int) and size == 1 for size in value.shape[2:])
    )


def _place(node: Any) -> int:
    return list(node.graph.nodes).index(node)


def _without_trailing_none(arguments: list[Any]) -> list[Any]:
    while arguments and arguments[-1] is None:
        arguments.pop()
    return arguments


def _layer_norm(node: Any) -> None:
    x, shape, weight, bias, *rest = _arguments(node, 6)
    value = x.meta["val"]
    if weight is None or bias is None or value.ndim != 3 or len(shape) != 1:
        return
    if value.dtype not in _DTYPES or value.shape[-1] > 8192:
        return
    eps = rest[0] if rest and rest[0] is not None else 1e-5
    x, weight, bias = _uncast(x), _uncast(weight), _uncast(bias)
    last = _cast_behind(node) or node
    dtype = last.meta["val"].dtype
    added = _plain_sum(x)
    # Both stand before everything else unless they are computed, from fp8 for instance.
    if added is None or max(_place(weight), _place(bias)) > _place(x):
        _replace(last, torch.ops.onediff.layer_norm.default, (x, weight, bias, eps, dtype))
        return
    with node.graph.inserting_before(x):
        both = node.graph.call_function(
            torch.ops.onediff.add_layer_norm.default, (*added, weight, bias, eps, dtype)
        )
        total = node.graph.call_function(operator.getitem, (both, 0))
        normed = node.graph.call_function(operator.getitem, (both, 1))
    total.meta["val"], normed.meta["val"] = x.meta["val"], last.meta["val"]
    both.meta["val"] = (total.meta["val"], normed.meta["val"])
    x.replace_all_uses_with(total)
    last.replace_all_uses_with(normed)


def _geglu(node: Any) -> None:
    value, gelu = node.args[:2]
    if not (isinstance(value, Node) and isinstance(gelu, Node)) or node.kwargs:
        return
    if value.target is _ATEN.gelu.default:
        value, gelu = gelu, value
    if gelu.target is not _ATEN.gelu.default or len(gelu.args) != 1 or gelu.kwargs:
        return
    first, second = _half(value), _half(gelu.args[0])
    if first is None or second is None or first[0] is not second[0]:
        return
    if (first[1], second[1]) == (0, 1):
        _replace(node, torch.ops.onediff.geglu.default, (first[0],))


def _product_in_8_bits(node: Any) -> None:
    """Have the rows of an 8-bit product written by what computes them.

    They come as `onediff_ext.engine.quantization.quantise_rows` traces them: reshape, to float32,
    division by the scale, rounding, and the cast.
    """
    cast = node.args[0]
    division, steps = cast, 0
    while division.target is not _ATEN.div.Tensor:
        division, steps = division.args[0], steps + 1
        if steps > 4 or not isinstance(division, Node):
            return
    wide, scale = division.args
    reshaped = wide.args[0] if wide.target is _ATEN.to.dtype else wide
    if reshaped.target not in _RESHAPES:
        return
    x = reshaped.args[0]
    if x.meta["val"].ndim != 3 or x.meta["val"].shape[-1] > 8192:
        return
    alone = len(x.users) == 1 and (
        len(reshaped.users) == 1
        or all(user is division or user.target is _ATEN.abs.default for user in reshaped.users)
    )
    dtype = cast.meta["val"].dtype
    # In fp8 what a LayerNorm gives has one scale, and nothing else has.
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


def _half(node: Any) -> tuple[Node, int] | None:
    """The tensor that a node is one half of, by its last dim, and which half."""
    if node.target is not operator.getitem:
        return None
    halves, index = node.args
    if halves.target not in (_ATEN.chunk.default, _ATEN.split.Tensor):
        return None
    whole, size, dim = (*halves.args, 0)[:3]
    shape = whole.meta["val"].shape
    if whole.meta["val"].dtype not in _DTYPES or len(shape) != 3 or dim not in (-1, 2):
        return None
    wanted = 2 if halves.target is _ATEN.chunk.default else shape[-1] // 2
    if not isinstance(shape[-1], int) or shape[-1] % 2 or size != wanted:
        return None
    return whole, index


def _plain_sum(node: Any) -> tuple[Any, Any] | None:
    """The two summands, when a node adds two tensors of its own form."""
    if not _is_sum(node):
        return None
    form = _form(node)
    summands = tuple(a for a in node.args if isinstance(a, Node) and _form(a) == form)
    return (summands[0], summands[1]) if len(summands) == 2 else None


def _form(node: Any) -> object:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return (value.dtype, *(str(size) for size in value.shape))


def _division(node: Any) -> None:
    """Drop a division by one, which changes nothing and stands between what fuses."""
    x, divisor = node.args[:2]
    if divisor == 1.0 and not isinstance(divisor, Node) and isinstance(x, Node):
        value = x.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype == node.meta["val"].dtype:
            node.replace_all_uses_with(x)


def _cross_attention(node: Any) -> None:
    """Attention of tokens to others than themselves, where a program has room for it."""
    query, key, value, mask, dropout, causal, scale, grouped = _arguments(node, 8)
    forms = [n.meta["val"] for n in (query, key, value)]
    width = forms[0].shape[-1]
    if mask is not None or dropout or causal or grouped or any(f.ndim != 4 for f in forms):
        return
    if any(f.dtype not in (torch.float16, torch.bfloat16) for f in forms):
        return
    if not isinstance(width, int) or width > 256 or any(f.shape[-1] != width for f in forms):
        return
    if str(forms[0].shape[2]) == str(forms[1].shape[2]):
        return
    if any(str(f.shape[:2]) != str(forms[0].shape[:2]) for f in forms):
        return
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return  # Triton multiplies without tensor cores there
    scale = width**-0.5 if scale is None else scale
    if scale <= 0:
        return
    _replace(node, torch.ops.onediff.cross_attention.default, (query, key, value, scale))


def _drop_dropout(node: Any) -> None:
    """Drop a dropout of nothing, which stands between what fuses."""
    if node.target is not _ATEN.dropout.default:
        return
    x, share, training = node.args
    if not training or share == 0.0:
        node.replace_all_uses_with(x)
        node.graph.erase_node(node)  # the uses of what is left are counted


def _drop_cast_to_itself(node: Any) -> None:
    if _is_cast(node) and node.args[0].meta["val"].dtype == node.meta["val"].dtype:
        node.replace_all_uses_with(node.args[0])
        node.graph.erase_node(node)


def _swish(node: Any) -> None:
    """x · sigmoid(x), as CompVis' VAE writes SiLU."""
    if node.target is not _ATEN.mul.Tensor or node.kwargs:
        return
    x, gate = node.args
    if isinstance(x, Node) and x.target is _ATEN.sigmoid.default:
        x, gate = gate, x
    if isinstance(gate, Node) and gate.target is _ATEN.sigmoid.default and gate.args[0] is x:
        _replace(node, _ATEN.silu.default, (x,))
        node.graph.erase_node(node)
        if not gate.users:
            node.graph.erase_node(gate)


def _is_cast(node: Any) -> bool:
    """Whether a node gives its input in another type at most, on the same device."""
    if getattr(node.target, "overloadpacket", None) is not _ATEN.to:
        return False
    given = _given(node)
    source, result = node.args[0].meta.get("val"), node.meta.get("val")
    if not (isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor)):
        return False
    plain = given.get("memory_format") in (None, torch.preserve_format) and not given.get("copy")
    return plain and source.device == result.device


def _uncast(node: Any) -> Any:
    """What was cast to float32, which reads the same."""
    if not (_is_cast(node) and node.meta["val"].dtype is torch.float32):
        return node
    source = node.args[0]
    return source if source.meta["val"].dtype in _DTYPES else node


def _cast_behind(node: Any) -> Any:
    """The cast of a float32 result to 16 bits, when there is no other use of it; all such casts
    become one."""
    users = list(node.users)
    types = {user.meta["val"].dtype for user in users if _is_cast(user)}
    if node.meta["val"].dtype is not torch.float32 or not users or len(types) != 1:
        return None
    if not all(map(_is_cast, users)) or not types <= {torch.float16, torch.bfloat16}:
        return None
    first, *others = sorted(users, key=_place)
    for other in others:
        other.replace_all_uses_with(first)
        other.graph.erase_node(other)
    return first


def _only_user(node: Any, *targets: object) -> Any:
    """The one node that uses this one, if it calls one of these."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in targets else None


def _arguments(node: Any, count: int) -> list[Any]:
    """Arguments in the order of the operator's schema, None where left out."""
    given = _given(node)
    return [given.get(argument.name) for argument in node.target._schema.arguments[:count]]


def _given(node: Any) -> dict[str, Any]:
    """Arguments by their names in the operator's schema."""
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _replace(node: Node, target: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, arguments)
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)


_RESHAPES = (_ATEN.reshape.default, _ATEN.view.default)
_REWRITES: dict[object, Callable[[Node], None]] = {
    _ATEN.div.Tensor: _division,
    _ATEN.scaled_dot_product_attention.default: _cross_attention,
    _ATEN._int_mm.default: _product_in_8_bits,
    _ATEN._scaled_mm.default: _product_in_8_bits,
    _ATEN.mul.Tensor: _geglu,
    _ATEN.group_norm.default: _group_norm,
    _ATEN.layer_norm.default: _layer_norm,
}
