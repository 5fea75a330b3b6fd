"""Runs what needs OneFlow itself: ``python -m tests.oneflow``, as install.py does.

Each part runs in a process of its own with a time limit, since OneFlow can end or hang the
process; what is left undone then has failed. A part that OneFlow killed is tried once more,
and says so: one of its runs in a few ended with SIGABRT for a reason that was not found.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("oneflow", "torch", "numpy", "protobuf", "nvidia-cublas-cu11", "nvidia-cudnn-cu11")
_PASSED, _KILLED = "passed", "FAILED: killed by"


@dataclass(frozen=True)
class Part:
    """Some tests and how long they may take; about five times what they take."""

    name: str
    arguments: tuple[str, ...]
    timeout_s: float
    environment: dict[str, str] = field(default_factory=dict)


def _files(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/oneflow/test_{name}.py" for name in names)


PARTS = (
    Part("parts", _files(
            "availability", "launch_order", "table", "graphs_list", "operators", "exchange"
        ), 600),
    Part("contract", ("tests/contracts/test_backend_contract.py", "-k", "oneflow"), 600),
    Part("plans", _files("plans"), 900),
    Part("models", _files("models"), 1200),
    # The engine's tests of weights, LoRA and checkpoints, through this backend.
    Part("weights", ("tests/engine/test_weights.py",), 900, {"ONEDIFF_TEST_BACKEND": "oneflow"}),
)


def main(arguments: list[str]) -> int:
    """Run the parts that are named, or all. Returns 0 when all of them passed."""
    for package in PACKAGES:
        print(f"{package} {importlib.metadata.version(package)}", flush=True)
    if arguments == ["--version"]:
        return 0
    from onediff_ext.backends.oneflow.availability import process_reason

    reason = process_reason()
    if reason is not None:  # or every test would be skipped
        print(f"OneFlow cannot be tested: {reason}")
        return 1
    lines, failed = [], 0
    with tempfile.TemporaryDirectory(prefix="onediff-oneflow-") as store:
        for part in PARTS:
            if arguments and part.name not in arguments:
                continue
            start = time.monotonic()
            outcome = _run(part, store)
            if outcome.startswith(_KILLED):
                print(f"{part.name}: {outcome}; once more")
                again = _run(part, store)
                outcome = f"passed at the second attempt ({outcome})" if again == _PASSED else again
            failed += not outcome.startswith(_PASSED)
            lines.append(f"{part.name:10} {time.monotonic() - start:5.0f} s  {outcome}")
    print("\n".join(["", "OneFlow:", *lines]))
    return 1 if failed or not lines else 0


def _run(part: Part, store: str) -> str:
    print(f"\n---- {part.name}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", *part.arguments]
    # What OneFlow prints before it ends the process must not be captured and lost with it.
    command += ["--capture=sys", "-p", "no:randomly", "-o", f"timeout={part.timeout_s:.0f}"]
    environment = {
        **os.environ,
        **part.environment,
        "ONEDIFF_TEST_STORE": store,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    try:
        status = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=part.timeout_s
        ).returncode
    except subprocess.TimeoutExpired:
        return f"FAILED: not done after {part.timeout_s:.0f} s"
    if status < 0:
        return f"{_KILLED} {signal.Signals(-status).name}"
    return _PASSED if status == 0 else f"FAILED (exit status {status})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
