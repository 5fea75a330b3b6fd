"""A node that joins late: how long after its model is loaded it draws with graphs.

The first node builds all graphs, or begins with a filled store. Then a node without a store joins
the Ray cluster. It fetches the graphs over Ray while it loads the model.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cluster_faults import NodesOfOneMachine, faults_arguments, make_pictures
from benchmarks.cluster_nodes import NodeProgram
from onediff_ext.cli import img2img
from onediff_ext.cli.cluster_programs import Img2ImgProgram
from onediff_ext.cli.model_identity import model_identity
from onediff_ext.cli.workers_ahead import WorkersAhead
from onediff_ext.cluster.coordinator import start_all
from onediff_ext.cluster.ray_pool import RayPool
from onediff_ext.core.start_up_times import seconds_since

COMPILED_WITHIN_S = 5.0
_JOIN_S = 60.0


def join_late(model: Path | None = None, filled: Path | None = None) -> dict[str, Any]:
    """Measure it with nodes of one machine.

    Args:
        model: A checkpoint; None takes the demo's.
        filled: A store that the first node begins with a copy of; None: it builds all graphs.

    Returns:
        Counts and seconds of both workers; ``ok`` is False when the late one has built a graph, has
        not got all of them, or has them later than `COMPILED_WITHIN_S` after its model.
    """
    with tempfile.TemporaryDirectory(prefix="onediff-late-") as name:
        folder = Path(name)
        make_pictures(folder / "in", 1, 1)
        arguments = faults_arguments(folder / "in", folder / "out", folder / "store", model)
        with NodesOfOneMachine(1) as machine:
            arguments.cluster = machine.address
            job = img2img.make_job(arguments, model_identity(arguments))
            program = Img2ImgProgram(arguments, job, "0" * 8)
            log = folder / "written.log"
            with WorkersAhead(arguments, delay_s=0) as ahead:
                pool = ahead.pool(NodeProgram(program, log, filled))
                first = _start_one(pool)
                pool.use(NodeProgram(program, log), pool.exchange)
                joined_at = time.time()
                machine.others.append(machine.add())
                _wait_until(lambda: pool.room() > 0)
                late = _start_one(pool)
    steps = late["start_up"]
    result: dict[str, Any] = {
        "what": "a node that joins late",
        "kinds": first["kinds"],
        "first": {"built": first["built"], "loaded": first["loaded"]},
        "late": {
            "built": late["built"],
            "loaded": late["loaded"],
            "seconds_after_joining": seconds_since(joined_at, steps),
        },
        "compiled_after_model_s": round(steps["graphs"] - steps["model"], 3),
        "bound_s": COMPILED_WITHIN_S,
    }
    result["ok"] = (
        late["built"] == 0
        and late["loaded"] == late["kinds"] == first["kinds"] > 0
        and result["compiled_after_model_s"] <= COMPILED_WITHIN_S
    )
    return result


def _start_one(pool: RayPool) -> dict[str, Any]:
    """Start a worker, wait until it is ready, and return what it tells of itself."""
    [worker] = start_all(pool, 1)
    return worker.about


def _wait_until(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + _JOIN_S
    while not holds():
        if time.monotonic() > ends_at:
            raise TimeoutError("The node has not joined.")
        time.sleep(0.1)
