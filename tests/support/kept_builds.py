"""Compiled graphs that test runs keep by content: a program is compiled once for a compiler.

A change of the engine may name other kinds, or trace again, and lead to the same programs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from onediff_ext.building.worker_process import Built, WorkerProcess
from onediff_ext.engine.machine import machine_digest
from tests.support.kept_exports import keep_bytes, read_bytes
from tests.support.kept_folders import BUILD_SOURCES, kept_folder

# The lines of the sources that traced a program; they do not change its graph.
_STACK_TRACE = re.compile(rb'"stack_trace": "(?:\\.|[^"\\])*"')


@contextlib.contextmanager
def kept_builds(compiler: WorkerProcess | None = None) -> Iterator[None]:
    """Within the block, a worker compiles with Inductor only what no test run has compiled yet.

    Args:
        compiler: Compiles in the place of all sessions' workers, one program after the other. A
            worker takes 6 s of processor time before its first program. None leaves each to its
            own worker.
    """
    folder, slow = kept_folder("test-builds", BUILD_SOURCES), WorkerProcess.build
    turn = threading.Lock()

    def build(worker: WorkerProcess, program: bytes, device: str, timeout_s: float) -> Built:
        if worker._backend != "inductor":
            return slow(worker, program, device, timeout_s)
        path = folder / digest_of_program(program, torch.device(device))
        # Files that start together need the same graphs: one of them compiles, the others wait.
        with FileLock(path.with_suffix(".lock")):
            payload = read_bytes(path)
            if payload is not None:
                return Built(payload, 1.0)
            if compiler is None:
                built = slow(worker, program, device, timeout_s)
            else:
                with turn:
                    built = slow(compiler, program, device, timeout_s)
            keep_bytes(path, built.payload)
            return built

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerProcess, "build", build)
        yield


def digest_of_program(program: bytes, device: torch.device) -> str:
    """Digest of all that decides a program's graph on this machine, with one compiler."""
    digest = hashlib.sha256(f"{device} {machine_digest(device)}".encode())
    with zipfile.ZipFile(io.BytesIO(program)) as archive:
        for name in sorted(archive.namelist()):
            content = archive.read(name)
            if Path(name).suffix == ".json":
                content = _STACK_TRACE.sub(b"", content)
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()
