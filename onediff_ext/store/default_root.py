"""Where the store lies when nobody says otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT_VARIABLE = "ONEDIFF_STORE"
FOLDER_NAME = "onediff-ext"


def default_root(
    environ: Mapping[str, str] | None = None,
    platform: str | None = None,
    home: Path | None = None,
) -> Path:
    """Return the store's folder: $ONEDIFF_STORE, else the user's cache folder.

    Args:
        environ, platform, home: Stand-ins for `os.environ`, `sys.platform` and
            the user's home folder.

    Source: the XDG base directory specification 0.8, which also says that a
    relative $XDG_CACHE_HOME is to be ignored.
    """
    environ = os.environ if environ is None else environ
    platform = sys.platform if platform is None else platform
    if chosen := environ.get(ROOT_VARIABLE):
        return Path(chosen).expanduser()
    home = Path.home() if home is None else home
    if platform == "win32":
        local = environ.get("LOCALAPPDATA")
        return (Path(local) if local else home / "AppData" / "Local") / FOLDER_NAME
    if platform == "darwin":
        return home / "Library" / "Caches" / FOLDER_NAME
    cache = environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else home / ".cache") / FOLDER_NAME
