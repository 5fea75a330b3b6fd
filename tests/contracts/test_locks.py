"""Each lock that a background thread takes is free in a forked process (`core/forks.py`)."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "onediff_ext"
OTHERS = {
    # Held for a whole forward or load of the thread that uses the model.
    "engine/cuda_graphs/cache.py",
    "engine/deepcache/deepcache_forward.py",
    "engine/guidance/attention_gate.py",
    "engine/prompt_work.py",
    "hosts/diffusers/checkpoints/tensor_read_ahead.py",
    # A forked process has no GPU.
    "backends/oneflow/static_graphs.py",
    "engine/running/fp16_accumulation.py",
    "hosts/pinned_memory.py",
    "hosts/pinned_moves.py",
    # Of one build run, or of a worker that builds.
    "backends/inductor/code_choices.py",
    "building/worker_process.py",
    # Of workers that Ray starts, and of the stand-alone page.
    "building/shared_graphs.py",
    "cluster/worker.py",
    "core/start_up_times.py",
    "panel/warm_up_run.py",
    "standalone/app.py",
    "store/memory_exchange.py",
    # Of a run of batches: a forked process draws none.
    "pictures/batch/run_batches.py",
    "pictures/batch/shared_batches.py",
}
"""Files whose locks stay as they are at a fork."""


def test_locks_are_free_in_a_forked_process() -> None:
    plain = re.compile(r"threading\.(Lock|RLock|Condition|Semaphore)\(")
    files = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if plain.search(path.read_text(encoding="utf-8"))
    }
    assert files - {"core/forks.py"} == OTHERS
