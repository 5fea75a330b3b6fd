"""The process that builds graphs, started by `start_worker.py`.

It reads one JSON object a line: ``{"task": "build", "program": path, "graph": path, "backend":
name, "device": "cpu"}``, and answers each with ``{"seconds": s}`` or ``{"error": text, "blame":
"graph", "machine" or "memory"}``, with ``"spent": true`` when it can build nothing more.
``"build"`` writes the graph; ``"prove"`` reads one that comes from elsewhere, and may die of
it. It needs nothing but torch and the backend's own package. It ends, with its own compilers,
as soon as its standard input closes, so that none survives the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

from onediff_ext.core.priority import step_back

_NO_ROOM = ("No space left on device", "Disk quota exceeded", "No working C++ compiler")
_NO_MEMORY = (
    "out of memory",
    "Cannot allocate memory",
    "MemoryError",
    "error return without exception set",  # of C code that did not expect to run out of it
    "bad_alloc",
    "DefaultCPUAllocator",
    "virtual memory exhausted",  # g++
    "Killed signal",  # g++, when the system has ended its compiler
)


def main(arguments: list[str]) -> int:
    """Serve build requests until standard input closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what compilers print must not be taken for an answer
    requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    _step_back(in_background="background" in arguments)
    import torch  # noqa: F401  (the slow part of starting, before "ready")

    answers.write('{"ready": true}\n')
    while (line := requests.get()) is not None:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
    return 0


def _step_back(in_background: bool) -> None:
    """Pictures come first, for the processor and for memory."""
    step_back(in_background)
    # When memory runs out, the system ends this process and not the one that draws.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _read_requests(requests: queue.SimpleQueue[str | None]) -> None:
    for line in sys.stdin:
        requests.put(line)
    # The parent is gone or has no more use for this worker, which may be deep in a build.
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _answer(request: dict[str, str]) -> dict[str, object]:
    import torch

    from onediff_ext.backends.registry import make_backend
    from onediff_ext.building.worker.trial import try_out
    from onediff_ext.core.errors import OneDiffError
    from onediff_ext.engine.export.exporter import load_program

    start = time.perf_counter()
    device, graph = torch.device(request["device"]), Path(request["graph"])
    backend = make_backend(request["backend"])

    def failed(text: str, blame: str) -> dict[str, object]:
        return {"error": text, "blame": blame, "spent": backend.needs_restart}

    try:
        program = load_program(Path(request["program"]).read_bytes(), device)
    except Exception as exc:  # it was written a moment ago: what fails is this process
        blame = "machine" if _blame(exc) == "machine" else "memory"
        return failed(f"The exported block cannot be read: {_first_line(str(exc))}", blame)
    try:
        is_new = request["task"] == "build"
        payload = backend.build(program, device) if is_new else graph.read_bytes()
        problem = try_out(program, backend.load(payload, device), device)
        if problem is not None:
            return failed(problem, "graph")
        if is_new:
            graph.write_bytes(payload)
    except OneDiffError as exc:
        return failed(_first_line(exc.message), _blame(exc))
    except Exception as exc:  # compilers raise anything; this process exists to contain it
        return failed(f"{type(exc).__name__}: {_first_line(str(exc))}", _blame(exc))
    return {"seconds": time.perf_counter() - start}


def _blame(exc: BaseException) -> str:
    """Whether the graph is at fault, or what it was built on."""
    text = str(exc)
    if any(words in text for words in _NO_ROOM):
        return "machine"
    if isinstance(exc, MemoryError) or any(words in text for words in _NO_MEMORY):
        return "memory"
    return "graph"


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "no message"
