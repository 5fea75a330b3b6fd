"""The driver is killed in the middle of a folder: nothing is lost, repeated or left behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("ray", reason="the extra cluster is not installed")

from benchmarks.cluster_faults import make_pictures

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine

pytest_plugins = ("tests.support.command_line",)

PICTURES, SIZES = 24, 3
KILLED_AFTER = 4  # pictures
WITHIN_S = 60.0


def test_the_same_command_goes_on_after_the_driver_was_killed(
    command_line: CommandLine, tmp_path: Path
) -> None:
    inputs, output = tmp_path / "in", tmp_path / "out"
    make_pictures(inputs, PICTURES, SIZES)
    draw = ["img2img", inputs, "--steps", 3, "--strength", 1, "--batch-size", 2, "--ignore-vae"]
    mark = f"ONEDIFF_TEST_RUN={tmp_path}"
    name, _, value = mark.partition("=")
    driver = command_line.spawn(*draw, "-o", output, "--gpus", 2, env={name: value})
    try:
        _wait_until(lambda: len(list(output.glob("*.png"))) >= KILLED_AFTER)
        assert len(_processes_with(mark)) > 3  # the driver, Ray's own, and the workers
    finally:
        driver.kill()
        driver.communicate()
    _wait_until(lambda: not _processes_with(mark))
    before = {path.name: path.stat().st_mtime_ns for path in output.glob("*.png")}
    assert KILLED_AFTER <= len(before) < PICTURES

    ended = command_line.process(*draw, "-o", output, "--gpus", 2)
    assert ended.status == 0, ended.err
    after = {path.name: path.stat().st_mtime_ns for path in output.glob("*.png")}
    assert after.keys() == {path.name for path in inputs.iterdir()}
    assert before.items() <= after.items()  # none was written again
    assert all(path.suffix == ".png" for path in output.iterdir())


def _wait_until(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.05)


def _processes_with(variable: str) -> list[bytes]:
    """Commands that inherited an environment variable.

    Ray's agents of a node do not count: without their node they end by themselves, which took them
    up to two minutes.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes())
    return [command for command in found if b"Agent" not in command]
