"""Named points during the writing of a file, where tests kill the process or cut the power.

Without a test there is no hook, and a point does nothing.
"""

from __future__ import annotations

from collections.abc import Callable

# Tests set this, in separate processes.
hook: Callable[[str], None] | None = None


def reached(point: str) -> None:
    """Tell a test that the process has reached `point`."""
    if hook is not None:
        hook(point)
