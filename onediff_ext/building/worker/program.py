"""The program of a worker process, started by `start_worker.py`.

It reads one JSON object per line: ``{"task": "build", "program": path, "graph": path, "backend":
name, "device": "cpu"}``. It answers each with ``{"seconds": s}`` or ``{"error": text, "blame":
"graph", "machine" or "memory"}``, with ``"needs_restart": true`` when it can build nothing more.
The task ``"build"`` writes the graph. The task ``"check load"`` reads a stored graph, which may
crash the process. The task ``"tune"`` reads a stored graph, writes another one that took more
effort, and adds ``"before_ms"`` and ``"after_ms"`` to its answer: a call of each, at the sizes of
`SHORTER`.

The task ``"store alone"`` (`store_alone`) comes when the parent ends: the worker finishes the build
before it, stores the graph, and ends. Tasks ``"build alone"`` come from a parent that has ended:
the worker builds and stores these graphs one after the other, and ends.

The worker needs only torch and the backend's own package. It ends, with its compilers, as soon as
its standard input closes, so it does not outlive the process that started it without such a task.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import signal
import threading
import time
from pathlib import Path
from typing import TextIO

from onediff_ext.building.worker.blame import MACHINE, MEMORY, blame_of
from onediff_ext.building.worker.store_alone import BUILD_ALONE, STORE_ALONE, AloneWorker
from onediff_ext.core.priority import give_memory_first, lower_priority
from onediff_ext.core.words import first_line

TUNE = "tune"
SHORTER = (1, 2)  # as for `usual_inputs`: large pictures, and pictures of a quarter of their size
_Request = dict[str, str] | None  # None after the last one


def main(arguments: list[str]) -> int:
    """Serve build requests until standard input closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # compilers print to standard output, which must hold answers only
    requests: queue.SimpleQueue[_Request | AloneWorker] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(_own_input(), requests), daemon=True).start()
    _step_back(in_background="background" in arguments)
    import torch  # noqa: F401  (the slow part of starting, before "ready")

    answers.write('{"ready": true}\n')
    answer: dict[str, object] = {}
    alone: AloneWorker | None = None
    while True:
        request = requests.get()
        if isinstance(request, AloneWorker):
            alone = request
        elif request is None:
            break
        elif alone is None:
            answer = _answer(request)
            with contextlib.suppress(OSError):  # the parent has ended, and the next request says so
                answers.write(json.dumps(answer) + "\n")
        elif request["task"] == BUILD_ALONE:
            alone.build(request, functools.partial(_answer, request))
        elif "seconds" in answer:
            alone.store(request, float(str(answer["seconds"])))
    assert alone is not None
    alone.remove_files()
    os._exit(0)  # the threads of a backend may not end


def _step_back(in_background: bool) -> None:
    """Let pictures go first, for processor time and memory."""
    lower_priority(in_background)
    give_memory_first()


def _own_input() -> TextIO:
    """Return what was standard input, and leave an empty one to libraries and compilers.

    While a thread waits for standard input, Windows answers no question about it. NumPy's libraries
    ask when they are loaded, and each program that inherits it when it starts: they would wait for
    the next request (github.com/numpy/numpy/issues/24290, github.com/python/cpython/issues/78961).
    """
    own_input = os.fdopen(os.dup(0), encoding="ascii")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return own_input


def _read_requests(lines: TextIO, requests: queue.SimpleQueue[_Request | AloneWorker]) -> None:
    """Pass requests on until the parent ends; then end the process, with its compilers.

    A worker that goes on alone ends by itself.

    Args:
        lines: From the parent.
        requests: Gets them.
    """
    alone = None
    with contextlib.suppress(OSError):  # without its lock it would lose its folder
        for line in lines:
            request = json.loads(line)
            if request["task"] in (STORE_ALONE, BUILD_ALONE):
                if alone is None:
                    alone = AloneWorker(Path(request["graph"]).parent)
                    requests.put(alone)
                alone.expect(request)
            requests.put(request)
            if request["task"] == STORE_ALONE:
                break
    if alone is not None:
        requests.put(None)
        time.sleep(alone.timeout_s)
    # The parent has ended or closed this worker, which may be in the middle of a build.
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _answer(request: dict[str, str]) -> dict[str, object]:
    import torch

    from onediff_ext.backends.registry import make_backend
    from onediff_ext.building.worker.speed import call_times_ms
    from onediff_ext.building.worker.trial import try_out
    from onediff_ext.core.errors import OneDiffError
    from onediff_ext.engine.export.exporter import load_program

    start, computed_before = time.perf_counter(), _processor_s()
    device, graph = torch.device(request["device"]), Path(request["graph"])
    backend = make_backend(request["backend"])

    def failed(text: str, blame: str) -> dict[str, object]:
        return {"error": text, "blame": blame, "needs_restart": backend.needs_restart}

    try:
        program = load_program(Path(request["program"]).read_bytes(), device)
    except Exception as exc:  # the program was just written, so this process is at fault
        blame = MACHINE if _blame(exc) == MACHINE else MEMORY
        return failed(f"The exported block cannot be read: {first_line(str(exc))}", blame)
    try:
        task, times = request["task"], dict[str, object]()
        stored = graph.read_bytes() if task in ("check load", TUNE) else b""
        payload = stored
        if task == TUNE:
            payload = backend.build_tuned(program, device)
        elif task != "check load":
            payload = backend.build(program, device)
        loaded = backend.load(payload, device)
        problem = try_out(program, loaded, device)
        if problem is not None:
            return failed(problem, "graph")
        if task == TUNE:
            both = [backend.load(stored, device), loaded]
            measured = [call_times_ms(both, program, shorter, device) for shorter in SHORTER]
            times = dict(zip(("before_ms", "after_ms"), zip(*measured, strict=True), strict=True))
        if payload is not stored:
            graph.write_bytes(payload)
    except OneDiffError as exc:
        return failed(first_line(exc.message), _blame(exc))
    except Exception as exc:  # compilers raise anything; this process exists to contain it
        return failed(f"{type(exc).__name__}: {first_line(str(exc))}", _blame(exc))
    # Beside pictures a build waits for the processors, which says nothing about the next one.
    seconds = min(time.perf_counter() - start, _processor_s() - computed_before)
    return {"seconds": seconds, **times}


def _processor_s() -> float:
    """Return the seconds that this process and its compilers have computed.

    Windows does not count those of compilers; there it is the time on the clock.
    """
    return time.perf_counter() if os.name == "nt" else sum(os.times()[:4])


def _blame(exc: BaseException) -> str:
    """Return what is at fault: the ``"graph"``, the ``"machine"``, or its ``"memory"``."""
    return MEMORY if isinstance(exc, MemoryError) else blame_of(str(exc))
