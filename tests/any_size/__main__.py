"""Small transformers beside eager with a real compiler: ``python -m tests.any_size --json FILE``.

For each model, one process builds its graphs and draws 20 sizes, prompts of 1 to 512 tokens and
batches of 1 to 3, with guidance and without. A second process does the same with other weights and
builds nothing. `tests/hosts/diffusers/test_transformers.py` is the short form.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.fingerprint import fingerprint
from onediff_ext.core.options import CompileOptions
from onediff_ext.hosts.diffusers.compile import compile_pipe, new_session
from onediff_ext.hosts.diffusers.jobs.run_report import recompile_count
from tests.support.draw import relative_error
from tests.support.transformer_draws import SIZES, draw, without_guidance
from tests.support.transformer_models import MODELS

TOLERANCE = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one-process", type=int, metavar="SEED", help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    if arguments.one_process is not None:
        print(json.dumps(measured(names[0], arguments)))
        return 0
    results = [result for name in names for result in both_processes(name, arguments.backend)]
    found = {"machine": fingerprint(torch.device("cpu")), "tolerance": TOLERANCE, "runs": results}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(result["holds"] for result in results) else 1


def both_processes(name: str, backend: str) -> list[dict[str, Any]]:
    """Measure one model in two processes with one store."""
    results = []
    with tempfile.TemporaryDirectory(prefix="onediff-any-size-") as store:
        for seed in range(2):
            command = [
                sys.executable, "-m", "tests.any_size", "--models", name, "--backend", backend,
                "--one-process", str(seed), "--store", store,
            ]  # fmt: skip
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode:
                raise SystemExit(ended.stderr)
            result = json.loads(ended.stdout.splitlines()[-1])
            result["holds"] &= seed == 0 or result["built"] == 0
            shown = {key: value for key, value in result.items() if key != "rows"}
            print(json.dumps(shown), flush=True)
            results.append(result)
    return results


def measured(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Draw all sizes in this process."""
    start, seed = time.perf_counter(), arguments.one_process
    pipe, twin = MODELS[name].make(seed=seed), MODELS[name].make(seed=seed)
    session = new_session(
        CompileOptions(backend=arguments.backend, build="wait", store=arguments.store)
    )
    compile_pipe(pipe, session=session, ignores=("vae",))
    for size in SIZES[:3]:  # with masks and without
        draw(pipe, name, size)
    kinds, rows = len(session.kinds), []
    for size in SIZES:
        for options in ({}, without_guidance(name)):
            options = {"num_inference_steps": 1, **options}
            error = relative_error(
                draw(pipe, name, size, **options), draw(twin, name, size, **options)
            )
            guided = len(options) == 1
            rows.append({**size._asdict(), "guidance": guided, "error": float(f"{error:.2g}")})
    worst = max(row["error"] for row in rows)
    reasons, recompiles = list(session.status().reasons), recompile_count()
    new_kinds = len(session.kinds) - kinds
    return {
        "model": name,
        "process": 1 + seed,
        "backend": session.backend.name,
        "kinds": kinds,
        "built": session.count("built"),
        "loaded": session.count("loaded"),
        "new_kinds_at_other_sizes": new_kinds,
        "recompiles": recompiles,
        "worst_error": worst,
        "reasons": reasons,
        "seconds": round(time.perf_counter() - start, 1),
        "holds": worst < TOLERANCE and not (recompiles or reasons or new_kinds),
        "rows": rows,
    }


if __name__ == "__main__":
    raise SystemExit(main())
