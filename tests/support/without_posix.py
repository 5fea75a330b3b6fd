"""Takes from processes what Windows lacks, so that the tests run as they would have to there.

``pytest -p tests.support.without_posix -o timeout_method=thread`` runs them with it. The names are
gone in the process of the tests, once the libraries are imported, and in the build workers from
their start. What Windows does otherwise (an open file cannot be removed) is not imitated.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

MODULES = ("fcntl", "resource", "termios")
OF_OS = (
    *("fork", "forkpty", "getloadavg", "getpgid", "getsid", "killpg", "memfd_create", "nice"),
    *("sched_getaffinity", "setpgid", "setsid", "sysconf"),
)
OF_SIGNAL = ("SIGHUP", "SIGALRM", "SIGKILL", "SIGSTOP", "SIGCONT", "SIGUSR1", "pthread_sigmask")
OF_TIME = ("clock_gettime", "clock_gettime_ns", "CLOCK_BOOTTIME")
# They choose between systems when they are imported, and not by these names.
_LIBRARIES = ("filelock", "diffusers", "transformers", "peft", "multiprocessing.util")
_IN_WORKERS = """
import runpy, sys
if any(word.endswith("start_worker.py") for word in sys.orig_argv):
    runpy.run_path({path!r})["take_away"]()
"""


def take_away() -> None:
    """Remove the modules and names from this process."""
    # It finds SIGKILL by its name.
    subprocess.Popen.kill = lambda process: process.send_signal(9)  # type: ignore[method-assign]
    for module in MODULES:
        sys.modules[module] = None  # type: ignore[assignment]
    for holder, names in ((os, OF_OS), (signal, OF_SIGNAL), (time, OF_TIME)):
        for name in names:
            if hasattr(holder, name):
                delattr(holder, name)


def add_what_windows_has() -> None:
    """Add the locks of `msvcrt`, and the most memory of a process as psutil reads it on Windows."""
    import fcntl  # before it is taken away

    import psutil

    def locking(descriptor: int, mode: int, length: int) -> None:
        assert (os.lseek(descriptor, 0, os.SEEK_CUR), mode, length) == (0, 2, 1)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    sys.modules["msvcrt"] = ModuleType("msvcrt")
    vars(sys.modules["msvcrt"]).update(LK_NBLCK=2, locking=locking)

    memory_info = psutil.Process.memory_info

    def with_peak(process: psutil.Process) -> SimpleNamespace:
        found = memory_info(process)._asdict()
        return SimpleNamespace(**found, peak_wset=found["rss"])

    psutil.Process.memory_info = with_peak


def environment_of_workers(folder: Path) -> dict[str, str]:
    """Return variables with which build workers begin without these names.

    Args:
        folder: An empty one, for the file that Python reads at its start.
    """
    (folder / "sitecustomize.py").write_text(_IN_WORKERS.format(path=__file__), encoding="utf-8")
    found = [str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, found))}


def pytest_configure() -> None:
    """As a plugin of pytest."""
    for library in _LIBRARIES:
        importlib.import_module(library)
    os.environ |= environment_of_workers(Path(tempfile.mkdtemp(prefix="onediff-tests-")))
    add_what_windows_has()
    take_away()
