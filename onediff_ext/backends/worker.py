"""The process that builds graphs: ``python -m onediff_ext.backends.worker``.

It reads one JSON object a line: ``{"program": path, "output": path, "backend": name,
"device": "cpu"}``, and answers each with ``{"seconds": s}`` or ``{"error": text,
"spent": bool}``; a spent process can build nothing more. It needs nothing but torch and the
backend's own package. It ends, with its own compilers, as soon as its standard input closes,
so that none survives the process that started it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path


def main() -> int:
    """Serve build requests until standard input closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what compilers print must not be taken for an answer
    requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(5)  # pictures come first
    import torch  # noqa: F401  (the slow part of starting, before "ready")

    answers.write('{"ready": true}\n')
    while (line := requests.get()) is not None:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
    return 0


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
    from onediff_ext.backends.trial import try_out
    from onediff_ext.core.errors import OneDiffError
    from onediff_ext.engine.trace import load_program

    start = time.perf_counter()
    device = torch.device(request["device"])
    backend = make_backend(request["backend"])

    def failed(text: str) -> dict[str, object]:
        return {"error": text, "spent": backend.spent}

    try:
        program = load_program(Path(request["program"]).read_bytes())
        payload = backend.build(program, device)
        problem = try_out(program, backend.load(payload, device), device)
        if problem is not None:
            return failed(problem)
        Path(request["output"]).write_bytes(payload)
    except OneDiffError as exc:
        return failed(exc.message)
    except Exception as exc:  # compilers raise anything; this process exists to contain it
        lines = str(exc).strip().splitlines()
        return failed(f"{type(exc).__name__}: {lines[0] if lines else 'no message'}")
    return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    sys.exit(main())
