"""A fixed sequence with LoRAs, sizes and CUDA graphs under NVIDIA's compute-sanitizer.

    python -m tests.differential.memcheck --store FOLDER --fill
    python -m tests.differential.memcheck --store FOLDER --json report.json --seconds 380
    python -m tests.differential.memcheck --store FOLDER --json planted.json --seconds 380 --planted

The first builds all graphs into the store, without the sanitizer. The second runs the sequence
under it and has to find no error. The third has a known fault (`moved_weights.py`), which the
sanitizer has to find. The exit status is 0 if all is as it should be. The report counts the errors
also where time ran out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODEL, WORLD = "sd15-wide", 7
# LoRAs on convolutions: their merged weights are large enough to go back to the GPU.
SEQUENCE = (
    "lora_add:0 size:1 again:1 lora_weights:2 size:2 lora_off:0 collect:0 size:1 lora_on:0"
    " lora_hotswap:5 collect:1 lora_unload:1 collect:5 size:2 all_weights_move:8 collect:3 again:11"
)
SANITIZER = (
    *("compute-sanitizer", "--tool", "memcheck", "--target-processes", "application-only"),
    # It connects at the first call of CUDA, long after the start: torch and the models come first.
    *("--launch-timeout", "0"),
    # torch asks the driver for functions that it does not have.
    *("--report-api-errors", "no", "--print-limit", "5"),
)
# Of the limit, what the sequence leaves to its end and to the sanitizer's summary.
_TO_END_S = 40.0


def command(module: str, device: str, store: Path, model: str, *more: str) -> list[str]:
    """The command for a Python module of this package."""
    return [
        *(sys.executable, "-m", module, "--device", device, "--store", str(store)),
        *("--model", model, "--world", str(WORLD), *more),
    ]


def errors_in(text: str) -> int | None:
    """The number of errors in the sanitizer's summary; None without one."""
    found = re.search(r"ERROR SUMMARY: (\d+) error", text)
    return None if found is None else int(found[1])


def scenario_in(text: str) -> dict[str, int]:
    """What the known fault's process has seen; empty if there was nothing to be found."""
    return {name: int(n) for name, n in re.findall(r"\b(replays_\w+|given_back_bytes)=(\d+)", text)}


def reports_in(text: str) -> int:
    """The number of errors that the sanitizer has printed so far."""
    return len(re.findall(r"^=+ (?:Invalid|Misaligned|Out-of-range|Program hit)", text, re.M))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.differential.memcheck")
    parser.add_argument("--store", type=Path, required=True, help="graphs are kept here")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--fill", action="store_true", help="build the graphs only")
    parser.add_argument("--planted", action="store_true", help="with the known fault")
    parser.add_argument("--seconds", type=float, default=380.0, help="it ends after so long")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--without-sanitizer", action="store_true", help="to try the sequences")
    options = parser.parse_args(arguments)
    is_bare = options.fill or options.without_sanitizer
    place = (options.device, options.store, options.model)
    limit = str(max(1.0, options.seconds - _TO_END_S))
    if options.planted:
        run = command("tests.differential.moved_weights", *place)
    else:
        sequence = ("--sequence", SEQUENCE, "--seconds", limit)
        run = command("tests.differential", *place, *sequence)
    report = run_for(options.seconds, run if is_bare else [*SANITIZER, *run])
    if options.planted:
        # Without the sanitizer, all that can be known is whether there was a fault to be found.
        report["right"] = bool(report["scenario"]) and (is_bare or report["errors"] > 0)
    else:
        report["steps_of_sequence"] = len(SEQUENCE.split())
        report["right"] = (
            report["steps"] == report["steps_of_sequence"]
            and (is_bare or report["has_summary"])
            and not (report["errors"] or report["exit_status"])
        )
    text = json.dumps({"device": options.device, "planted": options.planted, **report}, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0 if report["right"] else 1


def run_for(seconds: float, command: Sequence[str]) -> dict[str, Any]:
    """Run a command, for so long at most.

    Returns:
        What is known even if it was stopped: `exit_status`, `steps` that were done, `errors` so
        far, `scenario` (of the known fault), `has_summary` (whether the sanitizer reached its end),
        `seconds`, `last_lines`.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
    summary = errors_in(text)
    return {
        "exit_status": process.returncode,
        "scenario": scenario_in(text),
        "steps": len(re.findall(r"^ +[0-9.]+ s [a-z_]+:[0-9]+$", text, re.M)),
        "errors": reports_in(text) if summary is None else summary,
        "has_summary": summary is not None,
        "seconds": round(time.monotonic() - began, 1),
        "last_lines": text.splitlines()[-40:],
    }


if __name__ == "__main__":
    sys.exit(main())
