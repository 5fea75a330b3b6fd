"""The report that a user copies into an issue."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from onediff_ext import __version__
from onediff_ext.core.status import Status

_PACKAGES = ("torch", "triton", "gradio", "diffusers")


def report_text(status: Status, host: str, settings: Mapping[str, object]) -> str:
    """Return versions, settings and the status as text.

    Args:
        status: The status.
        host: The WebUI's name.
        settings: What the user chose in the panel.
    """
    lines = [
        f"OneDiff {__version__} in {host}",
        f"Python {platform.python_version()} on {platform.system()} {platform.machine()}",
        ", ".join(filter(None, map(_installed, _PACKAGES))),
        f"settings: {json.dumps(dict(settings), default=str)}",
        f"status: {json.dumps(status.as_json(), indent=1)}",
    ]
    return "\n".join(lines)


def _installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""
