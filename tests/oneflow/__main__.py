"""Run the tests that need OneFlow: ``python -m tests.oneflow``, as install.py does.

Each part runs in a separate process with a time limit, because OneFlow can crash or hang the
process; unfinished tests then count as failed. Two parts run at once, the longest first; what one
prints is shown when it has ended. ``--within SECONDS`` starts only parts that usually finish in
that time, and names the others.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("oneflow", "torch", "numpy", "protobuf", "nvidia-cublas-cu11", "nvidia-cudnn-cu11")
_PASSED, _NO_TIME = "passed", "not run: no time left for it"


@dataclass(frozen=True)
class Part:
    """Some tests, their usual seconds on two cores, and their time limit in seconds."""

    name: str
    arguments: tuple[str, ...]
    usual_s: float
    timeout_s: float
    environment: dict[str, str] = field(default_factory=dict)


def _files(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/oneflow/test_{name}.py" for name in names)


_PLAIN = _files("availability", "launch_order", "table", "graphs_list", "operators", "exchange")
PARTS = (
    Part("parts", _PLAIN, 60, 600),
    Part("contract", ("tests/contracts/test_backend_contract.py", "-k", "oneflow"), 90, 600),
    Part("graphs", _files("static_graphs"), 180, 900),
    Part("models", _files("models"), 240, 1200),
    # The engine's tests of weights, LoRA and checkpoints, through this backend.
    Part(
        "weights", ("tests/engine/test_weights.py",), 180, 900, {"ONEDIFF_TEST_BACKEND": "oneflow"}
    ),
)


def main(arguments: list[str]) -> int:
    """Run the named parts, or all. Return 0 when no part failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.oneflow")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(p.name for p in PARTS))
    parser.add_argument("--version", action="store_true", help="name the packages, run nothing")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="start no part too late")
    options = parser.parse_args(arguments)
    parts = [part for part in PARTS if not options.parts or part.name in options.parts]
    if not parts:
        parser.error(f"there is no part {' or '.join(options.parts)}")
    for package in PACKAGES:
        print(f"{package} {importlib.metadata.version(package)}", flush=True)
    if options.version:
        return 0
    from onediff_ext.backends.oneflow.availability import process_reason

    reason = process_reason()
    if reason is not None:  # or every test would be skipped
        print(f"OneFlow cannot be tested: {reason}")
        return 1
    begin, within = time.monotonic(), options.within
    with (
        tempfile.TemporaryDirectory(prefix="onediff-oneflow-") as folder,
        ThreadPoolExecutor(max_workers=2) as pool,
    ):

        def run(part: Part) -> tuple[str, str]:
            start = time.monotonic()
            if within is not None and start - begin + part.usual_s > within:
                return _NO_TIME, f"{part.name:10}         {_NO_TIME}"
            log = Path(folder) / f"{part.name}.log"
            outcome = _run(part, Path(folder) / "store", log)
            line = f"{part.name:10} {time.monotonic() - start:5.0f} s  {outcome}"
            # The rest may come to nothing, so it is shown now.
            printed = log.read_text(encoding="utf-8", errors="replace").rstrip()
            print(f"\n---- {part.name}\n{printed}\n{line}", flush=True)
            return outcome, line

        longest_first = sorted(parts, key=lambda part: part.usual_s, reverse=True)
        results = list(pool.map(run, longest_first))
    print("\n".join(["", "OneFlow:", *(line for _, line in results)]))
    return 0 if {outcome for outcome, _ in results} <= {_PASSED, _NO_TIME} else 1


def _run(part: Part, store: Path, log: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", *part.arguments]
    # pytest must not keep the output: OneFlow's last lines before a crash would be lost.
    command += ["--capture=sys", "-p", "no:randomly", "-o", f"timeout={part.timeout_s:.0f}"]
    environment = {
        **os.environ,
        **part.environment,
        "ONEDIFF_TEST_STORE": str(store),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    try:
        with log.open("wb") as output:
            status = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                timeout=part.timeout_s,
                stdout=output,
                stderr=subprocess.STDOUT,
            ).returncode
    except subprocess.TimeoutExpired:
        return f"FAILED: not done after {part.timeout_s:.0f} s"
    if status < 0:
        return f"FAILED: killed by {signal.Signals(-status).name}"
    return _PASSED if status == 0 else f"FAILED (exit status {status})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
