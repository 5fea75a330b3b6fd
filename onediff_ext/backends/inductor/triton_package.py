"""Triton, which makes Inductor's kernels for GPUs: whether it is there, and what installs it.

Nothing here installs anything; torch for Linux brings its Triton along, torch for Windows none.
"""

from __future__ import annotations

import sys

from onediff_ext.engine.torch_versions import RELEASE

# The Triton that each torch asks for, by its package's own metadata; the packages for Windows
# have the same numbers.
_WANTED = {
    (2, 6): (3, 2),
    (2, 7): (3, 3),
    (2, 8): (3, 4),
    (2, 9): (3, 5),
    (2, 10): (3, 6),
    (2, 11): (3, 6),
    (2, 12): (3, 7),
    (2, 13): (3, 7),
}


def missing_reason() -> str | None:
    """Why no kernels can be made, with the command that mends it; None when Triton is there."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return f"Triton is missing: {install_command(RELEASE, sys.platform, sys.executable)}"
    return None


def install_command(torch_release: tuple[int, int], platform: str, python: str) -> str:
    """What installs the Triton that goes with a torch, whatever environment the shell is in.

    Args:
        torch_release: Such as (2, 6).
        platform: As `sys.platform` says it.
        python: The interpreter that needs it.
    """
    package = "triton-windows" if platform == "win32" else "triton"
    if (wanted := _WANTED.get(torch_release)) is not None:
        major, minor = wanted
        package = f'"{package}<{major}.{minor + 1}"'
    quoted = f'"{python}"' if " " in python else python
    return f"{quoted} -m pip install {package}"
