"""Forks worker processes of builds from a process that has imported what they import.

    python fork_server.py SOCKET PACKAGE FOLDERS

Each request on the inherited socket has the descriptors of a worker's standard input, output and
error, and a line of JSON: its arguments, current folder and environment. Each answer is a line:
``{"started": pid}``, or ``{"ended": pid, "code": n}`` as `subprocess.Popen.returncode` has it. The
server ends when its socket closes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
from typing import Any, NoReturn

# What a worker imports for its first build and its first load.
_IMPORTS = (
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp_wrapper_cpu",
    "torch._inductor.codegen.cpp",
    "torch._inductor.package",
    "torch._export.serde.serialize",
    "torch._dynamo.testing",
    "onediff_ext.backends.eager",
    "onediff_ext.backends.inductor.backend",
    "onediff_ext.backends.inductor.compiler_files",
    "onediff_ext.building.worker.program",
    "onediff_ext.building.worker.trial",
    "onediff_ext.engine.export.exporter",
)
_REQUEST_BYTES = 1 << 20


def main(server: socket.socket) -> None:
    """Serve requests until the socket closes."""
    for name in _IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a worker would copy all of these pages
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([server, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            for pid, code in _ended():
                _tell(server, {"ended": pid, "code": code})
        if server in ready:
            line, descriptors, _, _ = socket.recv_fds(server, _REQUEST_BYTES, 3)
            while line and not line.endswith(b"\n"):
                more = server.recv(_REQUEST_BYTES)
                line = line + more if more else b""
            if not line:
                return
            pid = os.fork()
            if pid == 0:
                server.close()
                _be_a_worker(json.loads(line), descriptors)
            # Parent and child both set the group, so that it is there before either goes on.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            for descriptor in descriptors:
                os.close(descriptor)
            _tell(server, {"started": pid})


def _be_a_worker(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Run a worker's program, with the things of the process that it stands for."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)  # a group of its own: its compilers end with it
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        tempfile.tempdir = None
        _forget_folders()
        from onediff_ext.building.worker import program

        code = program.main(request["arguments"])
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _forget_folders() -> None:
    """Give a worker its own folder of precompiled headers: torch names it when it is imported."""
    from torch._inductor import codecache
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        old: str | None = getattr(codecache, name, None)
        if old is not None:
            own = old[old.index("precompiled_headers") :]
            setattr(codecache, name, os.path.join(default_cache_dir(), own))


def _ended() -> list[tuple[int, int]]:
    found = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))


def _tell(server: socket.socket, answer: dict[str, int]) -> None:
    try:
        server.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:
        sys.exit()


if __name__ == "__main__":
    _own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry and os.path.abspath(entry) != _own]
    _start = os.path.join(sys.argv[2], "building", "worker", "start_worker.py")
    runpy.run_path(_start)["import_package"](*sys.argv[2:4])
    main(socket.socket(fileno=int(sys.argv[1])))
