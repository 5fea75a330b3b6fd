"""The command and the environment of a worker process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import onediff_ext
from onediff_ext.engine.backend_port import COMPILER_FILES_VARIABLE

_INSTALLED = ("site-packages", "dist-packages")


def worker_command(script: Path) -> list[str]:
    """Return the command that starts a worker with this process's package and libraries.

    Args:
        script: The worker's own script.
    """
    flags = sys.flags
    options = ["-I"] if flags.isolated else []
    options += ["-E"] if flags.ignore_environment else []
    options += ["-s"] if flags.no_user_site else []
    package = Path(onediff_ext.__file__).resolve().parent
    # Where packages are installed, and never a script's folder or the current one.
    folders = {Path(entry) for entry in sys.path if entry.endswith(_INSTALLED)}
    folders |= {
        Path(found).resolve().parent.parent
        for name in ("torch", "filelock")
        if (found := getattr(sys.modules.get(name), "__file__", None))
    }
    where = os.pathsep.join(sorted(str(f) for f in folders if f.is_absolute()))
    return [sys.executable, *options, str(script), str(package), where]


def worker_environment(cache: Path, scratch: Path, compiler_files: Path) -> dict[str, str]:
    """Return a worker's environment: that of this process, with folders of its own for compilers.

    Args:
        cache: Workers may share it.
        scratch: The worker's own folder.
        compiler_files: For what the compiler makes for all graphs alike.
    """
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {
        COMPILER_FILES_VARIABLE: str(compiler_files),
        **os.environ,
        # An empty or relative entry means the current folder, which differs in the worker.
        "PYTHONPATH": os.pathsep.join(entry for entry in inherited if os.path.isabs(entry)),
        # Not the user's cache: builds leave nothing behind and find nothing old. And not another
        # worker's: a killed compiler leaves partial files.
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # several workers share the cores already
        # Deleted with the worker. Windows reads TMP and TEMP.
        **dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(scratch)),
        "OMP_NUM_THREADS": "1",
    }
