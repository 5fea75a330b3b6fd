"""Shorten OneFlow's errors, pages of C++ frames, to one line."""

from __future__ import annotations

import re

_KERNEL = re.compile(
    r"op_type_name: (\S+)\s+DeviceType_Name: k(\S+)\s+DataType_Name of \S+: k(\S+)"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def one_line(exc: BaseException) -> str:
    """Return what went wrong, without C++ locations."""
    text = _COLOUR.sub("", str(exc))
    kernel = _KERNEL.search(text)
    if kernel is not None:
        operator, device, dtype = kernel.groups()
        return f"OneFlow has no kernel for {operator} in {dtype.lower()} on this {device}"
    for line in text.splitlines():
        words = line.removeprefix("Error:").strip()
        if words and not words.startswith('File "'):
            return f"{type(exc).__name__}: {words}"[:200]
    return type(exc).__name__
