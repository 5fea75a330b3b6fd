"""A fixed sequence with LoRAs, sizes and CUDA graphs under NVIDIA's compute-sanitizer.

    python -m tests.differential.memcheck --store FOLDER

runs it once without the sanitizer, which builds all graphs into the store, then under it, and then
with a known fault, which the sanitizer has to find. The exit status is 0 if all is as it should be.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MODEL, WORLD = "sd15-wide", 7
SEQUENCE = (
    "lora_add:1 size:1 again:1 lora_weights:2 size:2 again:2 lora_add:3 lora_weights:4 size:1"
    " again:3 lora_off:0 collect:0 again:4 size:2 again:5 lora_on:0 lora_hotswap:5 collect:1"
    " lora_fuse:6 again:6 lora_unfuse:7 collect:2 again:7 size:3"
    " again:8 lora_delete:9 collect:4 again:9 lora_unload:1 collect:5 again:10 all_weights_move:8"
    " collect:3 again:11 size:1 undo:1 collect:6 compile_again:1 again:12 again:13"
)
# A replay reads weights that were moved and given back.
PLANT = "weights-that-moved"
PLANTS_SEQUENCE = "again:1 all_weights_move:8 collect:1 again:2"
SANITIZER = (
    *("compute-sanitizer", "--tool", "memcheck", "--target-processes", "application-only"),
    # torch asks the driver for functions that it does not have.
    *("--report-api-errors", "no", "--print-limit", "5"),
)


def command(device: str, store: Path, model: str, *more: str) -> list[str]:
    """The differential's command for the sequence."""
    return [
        *(sys.executable, "-m", "tests.differential", "--device", device, "--store", str(store)),
        *("--model", model, "--world", str(WORLD), "--shrink-seconds", "0", *more),
    ]


def errors_in(text: str) -> int | None:
    """The number of errors in the sanitizer's summary; None without one."""
    found = re.search(r"ERROR SUMMARY: (\d+) error", text)
    return None if found is None else int(found[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.differential.memcheck")
    parser.add_argument("--store", type=Path, required=True, help="graphs are kept here")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--without-sanitizer", action="store_true", help="to try the sequences")
    options = parser.parse_args(arguments)
    sanitizer = () if options.without_sanitizer else SANITIZER
    run = command(options.device, options.store, options.model, "--sequence", SEQUENCE)
    planted = command(
        *(options.device, options.store, options.model),
        *("--sequence", PLANTS_SEQUENCE, "--plant", PLANT),
    )
    is_right = _run("without the sanitizer", run)[0] == 0
    if is_right:
        status, errors = _run("under the sanitizer", [*sanitizer, *run])
        is_right = status == 0 and (errors == 0 or options.without_sanitizer)
        status, errors = _run("with a known fault", [*sanitizer, *planted])
        is_right = is_right and bool(status == 0 if options.without_sanitizer else errors)
    print("right" if is_right else "WRONG")
    return 0 if is_right else 1


def _run(what: str, command: Sequence[str]) -> tuple[int, int | None]:
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    errors = errors_in(text)
    lines = [line for line in text.splitlines() if line.startswith(("=====", "  --world"))]
    last = done.stdout.splitlines()[-1:] or text.splitlines()[-3:]
    print(f"{what}: exit status {done.returncode}, {errors} errors,", end=" ")
    print(f"{time.monotonic() - began:.0f} s", *lines[:40], *last, sep="\n", flush=True)
    return done.returncode, errors


if __name__ == "__main__":
    sys.exit(main())
