"""Moments in the writing of a file at which tests end the process or cut the power.

Nothing happens at them in use: no test, no hook.
"""

from __future__ import annotations

from collections.abc import Callable

# Set by tests, in processes of their own.
hook: Callable[[str], None] | None = None


def reached(point: str) -> None:
    """Tell a test that the process has come to `point`."""
    if hook is not None:
        hook(point)
