"""The stand-in of any WebUI."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from tests.support import a1111_stand_in, forge_stand_in


def running_stand_in(name: str) -> AbstractContextManager[Any]:
    """The fake host in `sys.modules`, within a ``with`` block.

    Args:
        name: ``"a1111"``, ``"forge"``, ``"neo"`` or ``"reforge"``.
    """
    return a1111_stand_in.a1111() if name == "a1111" else forge_stand_in.running(name)
