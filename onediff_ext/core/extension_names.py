"""Which extension some code belongs to: the name of its folder, as a user knows it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import PurePath

_FOLDERS = ("extensions", "extensions-builtin")
# How reasons name the module of foreign code: "Linear is patched by negpip.py (forward)".
_NAMED = re.compile(r"\b(?:by|function of) ([A-Za-z_][\w.\-]*)")
_STANDARD_PARTS = ("site-packages", "dist-packages")


def extension_of_file(path: str) -> str | None:
    """Return the folder of the extension that a file lies in, or the installed package.

    Args:
        path: Such as ``".../extensions/sd-webui-negpip/scripts/negpip.py"``.

    Returns:
        ``"sd-webui-negpip"``; None for a file of neither.
    """
    parts = PurePath(path.replace("\\", "/")).parts
    for folders in (_FOLDERS, _STANDARD_PARTS):
        for index, part in enumerate(parts[:-1]):
            if part in folders and index + 1 < len(parts):
                return parts[index + 1].removesuffix(".py")
    return None


def extension_of_module(name: str, file_of: Callable[[str], str | None]) -> str | None:
    """Return the extension that defines a module.

    Args:
        name: Full name of the module, or of its file, such as ``"negpip.py"``.
        file_of: Finds the file of a module that is not in `sys.modules`, or returns None.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = sys.modules.get(".".join(parts[:length]))
        path = getattr(module, "__file__", None)
        if path:
            return extension_of_file(path)
    path = file_of(name)
    return extension_of_file(path) if path else None


def module_in_reason(reason: str) -> str | None:
    """Return the module that an eager reason names, or None.

    Args:
        reason: Such as ``"Linear is patched by negpip.py (forward), which is not known here"``.
    """
    found = _NAMED.search(reason)
    return found[1].rstrip(".") if found else None
