"""Text of a block's classes, hyper-parameters and source for the key of its kind.

Stored graphs are found by this text: equal blocks give equal text in every process, and no
change of the code here may change it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, str, torch.dtype)
_DEPTH = 3


def qualified_name(cls: type) -> str:
    """Return ``"module.Class"``.

    Args:
        cls: Any class.
    """
    return f"{cls.__module__}.{cls.__qualname__}"


def digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of the text's SHA-256.

    Args:
        text: Hashed as UTF-8.
    """
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def source_digest(module_name: str) -> str:
    """Return the digest of a Python module's file.

    Args:
        module_name: Full name of a module that is imported.

    Returns:
        16 hexadecimal digits; "" for torch, which the key has by version; "none" for a module
        without a file.
    """
    if module_name.startswith("torch."):
        return ""
    path = getattr(sys.modules.get(module_name), "__file__", None)
    return digest(Path(path).read_text(encoding="utf-8")) if path else "none"


def describe(value: object, depth: int = 0) -> str:
    """Return text that is equal for equal hyper-parameters; it contains no address.

    Args:
        value: An attribute of a module, or a mapping of attributes.
        depth: How many objects `value` is nested in; attributes of deeper ones are left out.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "(" + ",".join(describe(v, depth) for v in value) + ")"
    if isinstance(value, Mapping):
        parts = (f"{k}={describe(v, depth)}" for k, v in sorted(value.items(), key=_by_name))
        return "{" + ",".join(parts) + "}"
    if isinstance(value, type):
        return qualified_name(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if depth < _DEPTH and hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        return qualified_name(type(value)) + describe(vars(value), depth + 1)
    return qualified_name(type(value))


def _by_name(item: tuple[Any, Any]) -> str:
    return str(item[0])
