"""A build worker that takes a moment for each graph and needs no compiler, nor torch.

Everything but the build is the real one: pipes, process group, end with its parent. The graph
of the backend "eager" is the program itself.
"""

from __future__ import annotations

import os
import sys
import time
import types
from pathlib import Path

SECONDS = 0.03


def answer(request: dict[str, str]) -> dict[str, object]:
    """The program, half of it at a time, so that a kill finds it unfinished."""
    program = Path(request["program"]).read_bytes()
    if request["task"] == "build":
        with Path(request["graph"]).open("wb") as file:
            file.write(program[: len(program) // 2])
            file.flush()
            time.sleep(float(os.environ.get("SLOW_WORKER_S", SECONDS)))
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
