"""The process that builds graphs: ``python -m onediff_ext.backends.worker``.

It reads one JSON object a line: ``{"program": path, "output": path, "backend": name,
"device": "cpu"}``, and answers each with ``{"seconds": s}`` or ``{"error": text}``. It
needs nothing but torch. It ends, with its own compilers, as soon as its standard input
closes, so that none survives the process that started it.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

# Sizes that no example has: batch 1, odd sides, one token.
_TRIALS = ({"batch": 1, "long": 7, "short": 5}, {"batch": 3, "long": 13, "short": 2})


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
    from onediff_ext.core.errors import OneDiffError
    from onediff_ext.engine.trace import load_program

    start = time.perf_counter()
    device = torch.device(request["device"])
    backend = make_backend(request["backend"])
    try:
        program = load_program(Path(request["program"]).read_bytes())
        payload = backend.build(program, device)
        problem = _try_out(program, backend.load(payload, device), device)
        if problem is not None:
            return {"error": problem}
        Path(request["output"]).write_bytes(payload)
    except OneDiffError as exc:
        return {"error": exc.message}
    except Exception as exc:  # compilers raise anything; this process exists to contain it
        lines = str(exc).strip().splitlines()
        return {"error": f"{type(exc).__name__}: {lines[0] if lines else 'no message'}"}
    return {"seconds": time.perf_counter() - start}


def _try_out(program: object, graph: object, device: object) -> str | None:
    """Run the new graph at sizes that its example did not have, against eager operators."""
    import torch

    from onediff_ext.engine.check import compare
    from onediff_ext.engine.trace import input_fakes

    assert isinstance(program, torch.export.ExportedProgram)
    assert callable(graph)
    fakes = input_fakes(program)
    generator = torch.Generator(device="cpu").manual_seed(0)
    for trial in _TRIALS:
        sizes: dict[object, int] = {}
        arguments = [_random_like(fake, trial, sizes, device, generator) for fake in fakes]
        with torch.no_grad():
            expected = program.graph_module(*arguments)[0]
            comparison = compare(graph(arguments), expected)
        if comparison.problem is not None:
            shapes = [tuple(a.shape) for a in arguments[-2:]]
            return f"at sizes {shapes} the new graph {comparison.problem}"
    return None


def _random_like(
    fake: object, trial: dict[str, int], sizes: dict[object, int], device: object, generator: object
) -> object:
    import torch

    from onediff_ext.engine.trace import is_channels_last

    assert isinstance(fake, torch.Tensor)
    shape: list[int] = []
    for axis, size in enumerate(fake.shape):
        if isinstance(size, torch.SymInt):
            name = "batch" if axis == 0 else ("long" if axis % 2 else "short")
            shape.append(sizes.setdefault(size.node.expr, trial[name]))
        else:
            shape.append(int(size))
    values = torch.randn(shape, generator=generator)  # type: ignore[arg-type]
    if any(isinstance(size, torch.SymInt) for size in fake.shape):
        layout = torch.channels_last if is_channels_last(fake) else torch.contiguous_format
        return values.to(device=device, dtype=fake.dtype, memory_format=layout)  # type: ignore
    # A weight: at the usual scale of its fan-in, so that deep products stay of order 1.
    values *= max(1, math.prod(shape[1:])) ** -0.5
    like = torch.empty_strided(shape, fake.stride(), dtype=fake.dtype, device=device)  # type: ignore
    return like.copy_(values)


if __name__ == "__main__":
    sys.exit(main())
