"""Folders that test runs keep for the next one, until anything changes that may decide a content.

They lie in the user's cache folder, one for each content of the sources that decide. The name holds
their digest, so clones and branches share a folder only while these sources are equal.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import sys
import time
from pathlib import Path

import onediff_ext
from onediff_ext.store.default_root import ROOT_VARIABLE, default_root

EXPORT_SOURCES = (
    *("engine/*.py", "engine/blocks/*.py", "engine/export/*.py", "engine/running/*.py"),
    *("engine/validity/*.py", "hosts/**/*.py"),
)
"""The sources that decide an exported program, beside the kind's key."""

BUILD_SOURCES = ("backends/**/*.py", "building/worker/*.py", "engine/export/*.py")
"""The sources that decide a compiled graph, beside the exported program."""

GRAPH_SOURCES = (*EXPORT_SOURCES, *BUILD_SOURCES)
"""The sources that decide a stored graph, beside the kind's key."""

EXPORTS_VARIABLE = "ONEDIFF_TEST_EXPORTS"
"""In the environment: the folder of exported programs, which `tests/conftest.py` names."""

_PACKAGE = Path(onediff_ext.__file__).parent
_LIBRARIES = ("torch", "diffusers", "transformers", "peft", "numpy", "sympy")
_KEPT = 4


def kept_folder(name: str, patterns: tuple[str, ...]) -> Path:
    """Make a kept folder, or take the one that an earlier run made; drop what is unused for long.

    It loads no library.

    Args:
        name: Of the folders of one purpose.
        patterns: Sources that decide what the folder holds, relative to the package.
    """
    folders = default_root({**os.environ, ROOT_VARIABLE: ""}) / name
    folder = folders / digest_of(patterns)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    now = time.time_ns()  # the system's own timestamps are equal for some milliseconds
    os.utime(folder, ns=(now, now))
    by_last_use = sorted(folders.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for old in by_last_use[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def digest_of(patterns: tuple[str, ...], package: Path = _PACKAGE) -> str:
    """Digest of sources and of the versions of Python and the libraries, 16 hex digits."""
    digest = hashlib.sha256(sys.version.encode())
    for library in _LIBRARIES:
        try:
            version = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            version = "absent"
        digest.update(f"{library} {version}\n".encode())
    for path in sorted({path for pattern in patterns for path in package.glob(pattern)}):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(source)}\n".encode())
        digest.update(source)
    return digest.hexdigest()[:16]
