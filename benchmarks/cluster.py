"""Several GPUs and machines: faults on a CPU, a late node, a simulation, and speed on GPUs.

python -m benchmarks.cluster --nodes 3 --pictures 60 --kill 5 --json FILE
python -m benchmarks.cluster --late-node --json FILE
python -m benchmarks.cluster --simulate --workers 1000 --pictures 1000000 --json FILE
python -m benchmarks.cluster --model sdxl --gpus 2 --pictures 96 --json FILE

The last one merges rows of several calls; `--rows` names them, and "cfg-parallel" is one more.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Run one of the four; 1 when a promise of the first two is broken."""
    parser = argparse.ArgumentParser(prog="benchmarks.cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--pictures", type=int, default=60)
    parser.add_argument("--sizes", type=int, default=12)
    parser.add_argument("--kill", type=int, default=5, help="workers killed at random moments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--late-node", action="store_true")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--model", help="sdxl, or the file of a checkpoint")
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--height-px", type=int, default=1024, help="of the pictures of --gpus")
    parser.add_argument("--batch-size", type=int, default=1, help="pictures of one size at once")
    parser.add_argument("--rows", default="several-empty,several-filled,one-filled,one-empty")
    parser.add_argument("--limit-s", type=float, default=560, help="for all rows together")
    parser.add_argument("--work", type=Path, help="model, pictures and stores; kept for later rows")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.simulate:
        from benchmarks.cluster_simulation import simulate

        result = simulate(arguments.workers, arguments.pictures, seed=arguments.seed)
        status = 0
    elif arguments.gpus is not None:
        from benchmarks.cluster_speed import SpeedJob, measure

        job = SpeedJob(
            arguments.model,
            arguments.gpus,
            arguments.pictures,
            arguments.sizes,
            arguments.steps,
            arguments.batch_size,
            arguments.rows.split(","),
            arguments.limit_s,
            arguments.work,
            arguments.height_px,
        )
        print(json.dumps(measure(job, arguments.json), indent=1))
        return 0
    elif arguments.late_node:
        import torch

        from benchmarks.cluster_late_node import join_late
        from benchmarks.fingerprint import fingerprint

        result = join_late(None if arguments.model is None else Path(arguments.model))
        result["fingerprint"] = fingerprint(torch.device("cpu"))
        status = 0 if result["ok"] else 1
    else:
        import torch

        from benchmarks.cluster_faults import run_with_faults
        from benchmarks.fingerprint import fingerprint

        result = run_with_faults(
            arguments.nodes,
            arguments.pictures,
            arguments.sizes,
            arguments.kill,
            seed=arguments.seed,
        )
        result["fingerprint"] = fingerprint(torch.device("cpu"))
        status = 0 if result["ok"] else 1
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
