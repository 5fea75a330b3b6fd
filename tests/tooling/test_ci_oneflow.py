"""The gate's OneFlow step fails when a test has failed, and else says what was not run and why."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="the gate is a shell script")

_SET_UP = 'if [ "$4" = --version ]; then {}; exit $?; fi\n'
_SUITE = "echo 'parts         20 s  {}'\n{}\n"


@pytest.fixture
def step(tmp_path: Path):
    """Runs the step with something in Python's place; returns (exit status, its line)."""

    def run(set_up: str, suite: str = "", limit_s: int = 1000, **settings: str) -> tuple[int, str]:
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\n" + _SET_UP.format(set_up) + suite)
        python.chmod(0o755)
        note = tmp_path / "note"
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": str(python)}
        status = subprocess.run(
            ["bash", ROOT / ".ci/oneflow", str(limit_s), note],
            env={**environment, **settings}, capture_output=True, timeout=60,
        ).returncode  # fmt: skip
        return status, note.read_text()

    return run


def test_all_passed(step) -> None:
    assert step("true", _SUITE.format("passed", "exit 0")) == (0, "ok\n")


def test_a_failed_test_fails_the_gate(step) -> None:
    failed = _SUITE.format("FAILED (exit status 1)", "exit 1")
    assert step("true", failed) == (1, "FAILED\n")
    assert step("true", "exit 3") == (1, "FAILED (exit status 3)\n")
    # Also when the time is over before the suite ends.
    assert step("true", _SUITE.format("FAILED: killed by SIGABRT", "exit 124")) == (1, "FAILED\n")


def test_what_had_no_time_is_said(step) -> None:
    some = _SUITE.format("passed", "echo 'models         not run: no time left for it'; exit 0")
    assert step("true", some) == (0, "ok, but for 1 parts there was no time\n")
    late = _SUITE.format("passed", "exit 124")
    expected = "not finished within 1000 s; no test had failed until then\n"
    assert step("true", late) == (0, expected)
    expected = "not run: its set-up (4 GB) was not done within 1000 s\n"
    assert step("exit 124") == (0, expected)
    assert step("true", limit_s=60) == (0, "not run: the other steps have left it no time\n")


def test_a_set_up_that_cannot_be_is_said(step) -> None:
    assert step("echo 'install.py: no Python 3.10 was found.'; echo '  Install one.'; false") == (
        0,
        "not run: no Python 3.10 was found. Install one.\n",
    )
    assert step("true", ONEDIFF_CI_ONEFLOW="0") == (0, "not run: ONEDIFF_CI_ONEFLOW is 0\n")


def test_the_environment_is_kept_for_the_next_run(step, tmp_path: Path) -> None:
    step('echo "$ONEDIFF_ONEFLOW_VENV" > "$HOME/where"; true', "exit 0")
    kept = tmp_path / ".cache/onediff-ext/venv-oneflow"
    assert (tmp_path / "where").read_text() == f"{kept}\n"
