"""Whether Triton, which compiles Inductor's GPU kernels, is installed; and its install command.

Nothing here installs anything. torch for Linux includes Triton; torch for Windows does not.
"""

from __future__ import annotations

import sys

from onediff_ext.engine.torch_versions import RELEASE

# torch release → Triton release, from torch's package metadata. Packages for Windows have the
# same numbers.
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
    """Return why kernels cannot be compiled, with the install command; None when Triton works."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return f"Triton is missing: {install_command(RELEASE, sys.platform, sys.executable)}"
    return None


def install_command(torch_release: tuple[int, int], platform: str, python: str) -> str:
    """Return the command that installs the matching Triton, from any shell environment.

    Args:
        torch_release: Such as (2, 6).
        platform: A value of `sys.platform`.
        python: The interpreter that needs it.
    """
    package = "triton-windows" if platform == "win32" else "triton"
    if (wanted := _WANTED.get(torch_release)) is not None:
        major, minor = wanted
        package = f'"{package}<{major}.{minor + 1}"'
    quoted = f'"{python}"' if " " in python else python
    return f"{quoted} -m pip install {package}"
