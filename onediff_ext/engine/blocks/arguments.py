"""The arguments of a block's call by name, for families that sort them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def named_arguments(
    order: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments of one call by name.

    Args:
        order: The names that are known, in the order of the signature.
        args, kwargs: Of the call.

    Returns:
        Name → argument, or None when an argument is unknown. Unknown ones that are None are left
        out.
    """
    if len(args) > len(order):
        return None
    named = dict(zip(order, args, strict=False))
    for name, value in kwargs.items():
        if name not in order or name in named:
            if value is None:
                continue
            return None
        named[name] = value
    return named
