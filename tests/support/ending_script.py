"""A user's script that ends while workers build: ``python -m tests.support.ending_script FOLDER
WHEN``.

FOLDER holds ``programs.pickle``, by digest, and becomes the folder of the store and of temporary
files. WHEN says how far the workers are at the end: ``building``, ``starting``, or ``drawn`` for a
script that ends right after its picture, without a worker. A forked process does first what it
would do at its own end.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from onediff_ext.building.build_context import BuildContext
from onediff_ext.building.build_folder import ALONE_LOCK
from onediff_ext.building.worker_process import WorkerProcess
from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.hosts.diffusers.compile import compile_pipe, new_session
from tests.support import slow_worker
from tests.support.session_fixtures import SmallUNet

WORKERS = 2
_PATIENCE_S = 60.0


class _SlowWorker(WorkerProcess):
    script = Path(slow_worker.__file__)


def main(folder: Path, when: str) -> None:
    programs = pickle.loads((folder / "programs.pickle").read_bytes())
    tempfile.tempdir = str(folder / "tmp")
    workers: list[_SlowWorker] = []

    def new_worker(context: BuildContext, cache: Path, in_background: bool) -> WorkerProcess:
        workers.append(_SlowWorker("eager", cache, in_background))
        return workers[-1]

    BuildContext.new_worker = new_worker  # type: ignore[method-assign,assignment]
    if when != "drawn":
        BlockKind.export = lambda kind: programs[kind.key.digest]  # type: ignore[method-assign]
    small = SmallUNet()
    options = CompileOptions(backend="eager", store=folder / "store", workers=WORKERS)
    session = new_session(options)
    session.build_context.export_children = 1 if when == "drawn" else 0
    compile_pipe(small.pipe, session=session)
    small()
    if when == "drawn":
        assert not workers
        return
    if when == "starting":
        wait_for(lambda: sum(worker.pid is not None for worker in workers) == WORKERS)
    else:
        wait_for(lambda: sum(worker._was_asked for worker in workers) == WORKERS)
    child = os.fork()
    if child == 0:
        session.background.hand_over()
        os._exit(0)
    os.waitpid(child, 0)
    assert all(worker.pid is not None for worker in workers), "the child ended the workers"
    assert not list(folder.glob(f"tmp/*/*/{ALONE_LOCK}"))


def wait_for(is_so: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < ends_at
        time.sleep(0.002)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
