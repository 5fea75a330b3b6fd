"""Drive a pipeline and its eager twin through random sequences, and compare every picture.

    python -m tests.differential --seed 1 --steps 500 --json report.json
    python -m tests.differential --device cuda --seconds 400    # real CUDA graphs and Inductor
    python -m tests.differential --plant NAME     # put a known fault back: exit status 0 if found
    python -m tests.differential --plant list
    python -m tests.differential --world 123 --sequence "size:1 again:2"   # one sequence

The exit status without a plant is 0 if nothing differs, 1 otherwise. The report is written after
each sequence, so a run that is killed leaves one.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no step after these")
    parser.add_argument(
        "--store", type=Path, metavar="FOLDER", help="keep graphs for all sequences"
    )
    parser.add_argument(
        "--model", help="of `MODELS` or `WIDE_MODELS`; a random one for each sequence"
    )
    parser.add_argument(
        "--dtype", help="of the models, such as float64: what is still there is no rounding"
    )
    parser.add_argument("--plant", metavar="NAME", help='a known fault; "list" prints their names')
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--eager", action="store_true", help="compile nothing: try the operations")
    parser.add_argument("--shrink-seconds", type=float, default=60.0, help="for each mismatch")
    parser.add_argument("--most", type=int, default=10, help="mismatches after which it ends")
    parser.add_argument("--programs", type=Path, metavar="FILE", help="keep exported programs here")
    parser.add_argument("--world", type=int, help="the seed of one sequence's models")
    parser.add_argument("--sequence", help="run these operations only")
    options = parser.parse_args(arguments)
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    warnings.simplefilter("ignore")

    import torch

    from tests.differential.plants import PLANTS
    from tests.differential.sequences import Driver, Ended, Found, Step, as_json
    from tests.support import quick_builds

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    if options.plant == "list":
        print("\n".join(PLANTS))
        return 0
    if options.programs is not None and options.programs.exists():
        quick_builds._BUILT.update(torch.load(options.programs))
    folder = tempfile.TemporaryDirectory(prefix="onediff-differential-store-")
    if options.store is None and options.device.startswith("cuda"):
        options.store = Path(folder.name)  # or each sequence would build its own
    driver = Driver(
        options.device,
        compiled=not options.eager,
        plant=options.plant,
        store=options.store,
        model=options.model,
        dtype=options.dtype and getattr(torch, options.dtype),
    )
    began, found = time.monotonic(), list[Found]()

    def write() -> dict[str, Any]:
        report = as_json(
            driver.counts,
            found,
            seed=options.seed,
            device=options.device,
            plant=options.plant,
            torch=torch.__version__,
            seconds=round(time.monotonic() - began, 1),
        )
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return report

    def listen(ended: Ended) -> None:
        write()
        so_far = f"{driver.counts.steps} steps, {driver.counts.replays} replays"
        ready = f"ready after {ended.ready_s} s"
        print(
            f"{ended.model}: {ended.steps} steps in {ended.seconds} s, {ready}; so far {so_far}",
            flush=True,
        )

    if options.sequence is not None:
        steps = [Step.parse(text) for text in options.sequence.split()]
        one = driver.run(
            options.world,
            steps,
            options.seconds,
            lambda step: print(f"{time.monotonic() - began:7.1f} s {step}", flush=True),
        )
        if one is not None:
            found.append(one)
            _say(one)
    else:
        if options.device.startswith("cuda"):
            graphs = driver.fill(min(240.0, options.seconds / 2))
            print(f"{graphs} graphs, {time.monotonic() - began:.0f} s", flush=True)
        seconds = options.seconds - (time.monotonic() - began)
        for each in driver.random_run(options.seed, options.steps, seconds, listen):
            if each.mismatch.what == "device":
                found.append(each)
                _say(each)
                break
            if options.plant and not driver.is_planted(each):
                continue
            found.append(driver.shortest(each, options.shrink_seconds))
            _say(found[-1])
            if options.plant or len(found) >= options.most:
                break
    if options.programs is not None:
        torch.save(dict(quick_builds._BUILT), options.programs)
    report = write()
    folder.cleanup()
    print(
        f"{report['steps']} steps, {len(report['operations'])} of {report['kinds_of_operation']}"
        f" kinds of operation, {report['graph_calls']} calls of graphs, {report['replays']}"
        f" replays, {len(found)} mismatches, {report['seconds']} s"
    )
    if options.plant:
        return 0 if found else 1
    return 1 if found else 0


def _say(found: object) -> None:
    from tests.differential.sequences import Found

    assert isinstance(found, Found)
    print(
        f"{found.mismatch.what}: {found.mismatch.text}\n"
        f'  --world {found.world} --sequence "{" ".join(map(str, found.steps))}"',
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
