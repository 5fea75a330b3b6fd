"""A build worker that takes a moment for each graph and needs neither compiler nor torch.

Only the build is replaced. Pipes, process group and the end with its parent are real. The graph of
the backend "eager" is the program itself.
"""

from __future__ import annotations

import os
import sys
import time
import types
from pathlib import Path

SECONDS = 0.03


def answer(request: dict[str, str]) -> dict[str, object]:
    """Write the program as the graph, in two halves, so that a kill finds it incomplete."""
    program = Path(request["program"]).read_bytes()
    if request["task"] in ("build", "build alone"):
        with Path(request["graph"]).open("wb") as file:
            file.write(program[: len(program) // 2])
            file.flush()
            time.sleep(float(os.environ.get("SLOW_WORKER_S", SECONDS)))
            until = os.environ.get("SLOW_WORKER_UNTIL")
            while until and not os.path.exists(until):
                time.sleep(SECONDS)
            file.write(program[len(program) // 2 :])
    return {"seconds": SECONDS}


if __name__ == "__main__":
    package, folders = sys.argv[1:3]
    sys.path.append(os.path.join(package, "building", "worker"))
    from start_worker import import_package

    import_package(package, folders)
    sys.modules["torch"] = types.ModuleType("torch")
    from onediff_ext.building.worker import program

    program._answer = answer
    sys.exit(program.main(sys.argv[3:]))
