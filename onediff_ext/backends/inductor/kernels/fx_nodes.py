"""Reading and changing nodes of an exported FX graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

ATEN = torch.ops.aten
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Types that the kernels read and write."""


def is_sum(node: Any) -> bool:
    """Whether a node adds two tensors, with nothing else to it."""
    return (
        node.target in (ATEN.add.Tensor, ATEN.add_.Tensor)
        and not node.kwargs
        and len(node.args) == 2
        and all(isinstance(argument, Node) for argument in node.args)
    )


def position(node: Any) -> int:
    """Return the place of a node in its graph's order."""
    return list(node.graph.nodes).index(node)


def is_cast(node: Any) -> bool:
    """Whether a node only changes its input's type, or nothing, on the same device."""
    if getattr(node.target, "overloadpacket", None) is not ATEN.to:
        return False
    given = _given(node)
    source, result = node.args[0].meta.get("val"), node.meta.get("val")
    if not (isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor)):
        return False
    plain = given.get("memory_format") in (None, torch.preserve_format) and not given.get("copy")
    return plain and source.device == result.device


def uncast(node: Any) -> Any:
    """Return the input of a cast to float32, which holds the same values; else the node itself."""
    if not (is_cast(node) and node.meta["val"].dtype is torch.float32):
        return node
    source = node.args[0]
    return source if source.meta["val"].dtype in DTYPES else node


def narrowing_cast(node: Any) -> Any:
    """Return the cast of a float32 result to 16 bits, or None when the result has other users.

    Equal casts of one result become one.
    """
    users = list(node.users)
    types = {user.meta["val"].dtype for user in users if is_cast(user)}
    if node.meta["val"].dtype is not torch.float32 or not users or len(types) != 1:
        return None
    if not all(map(is_cast, users)) or not types <= {torch.float16, torch.bfloat16}:
        return None
    first, *others = sorted(users, key=position)
    for other in others:
        other.replace_all_uses_with(first)
        other.graph.erase_node(other)
    return first


def only_user(node: Any, *targets: object) -> Any:
    """Return the only user of a node, if it calls one of the targets; else None."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in targets else None


def arguments_of(node: Any, count: int) -> list[Any]:
    """Return the first arguments in the order of the operator's schema, None where left out."""
    given = _given(node)
    return [given.get(argument.name) for argument in node.target._schema.arguments[:count]]


def _given(node: Any) -> dict[str, Any]:
    """Return the arguments by their names in the operator's schema."""
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def replace(node: Node, target: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Put a call of another operator in place of a node."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, arguments)
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)
