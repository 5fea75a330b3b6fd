"""Interrupted runs: nothing is lost or left over, and the same command continues."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from onediff_ext.building.build_folder import BuildFolder
from tests.support.command_line import KINDS
from tests.support.processes import processes_with
from tests.support.sample_pictures import difference, save_pictures

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine

pytest_plugins = ("tests.support.command_line",)

if not hasattr(signal, "SIGKILL"):
    pytest.skip("needs POSIX signals; Windows ends processes otherwise", allow_module_level=True)

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
OPTIONS = ("--steps", "8", "--strength", "1", "--batch-size", "1")
COUNT = 8


class StoppedRun:
    """An img2img that got a signal at its first line of some kind.

    Args:
        command_line: Runs it.
        tmp_path: For pictures, results and the run's temporary files.
        options: More options.
    """

    def __init__(self, command_line: CommandLine, tmp_path: Path, *options: object) -> None:
        self._command_line = command_line
        self.folder = save_pictures(
            tmp_path / "in", **{f"p{n:02d}": (64, 64 + 8 * (n % 4)) for n in range(COUNT)}
        )
        self.out, self.tmp = tmp_path / "out", tmp_path / "tmp"
        self.tmp.mkdir()
        self.command = ("img2img", self.folder, "-o", self.out, *OPTIONS, *options)

    def stop_at(self, line_start: str, number: signal.Signals) -> str:
        """Start the command, stop it, and return what it said afterwards."""
        process = self._command_line.spawn(*self.command, env={"TMPDIR": str(self.tmp)})
        for line in process.stderr:
            if line.startswith(line_start):
                break
        else:
            raise AssertionError(f"{line_start!r} never came")
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == STATUS[number], err
        assert "Traceback" not in err
        if number is not signal.SIGKILL:
            assert err.endswith("Stopped. The same command goes on where it stopped.\n")
        assert self.processes() == []
        return str(err)

    def processes(self) -> list[int]:
        """Processes of this run that live, after a moment for workers to notice the end."""
        deadline = time.monotonic() + 5
        while (found := processes_with("TMPDIR", self.tmp)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def left_behind(self) -> list[str]:
        """Build folders of ours among the temporary files."""
        return [path.name for path in self.tmp.iterdir() if path.name.startswith("onediff")]

    def go_on(self, **options: Any) -> str:
        """The same command again, to the end; returns what it printed."""
        before = {path: path.stat().st_mtime_ns for path in self.out.glob("*")}
        ended = self._command_line(*self.command, **options)
        assert ended.status == 0, ended
        assert len(list(self.out.iterdir())) == COUNT
        assert {path: path.stat().st_mtime_ns for path in before} == before
        if before:
            count = f"{len(before)} picture{'' if len(before) == 1 else 's'}"
            assert f"{count} already done." in ended.out
        assert f"{COUNT - len(before)} pictures drawn" in ended.out
        return ended.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_while_drawing(command_line: CommandLine, tmp_path: Path, number: signal.Signals) -> None:
    options = ("--report", tmp_path / "report.json") if number is signal.SIGINT else ("--eager",)
    slow = ("--steps", 20)  # so that the signal comes before the last picture
    run = StoppedRun(command_line, tmp_path, *options, *slow)
    run.stop_at("pictures 3/", number)
    done = list(run.out.iterdir())
    assert 2 <= len(done) < COUNT
    assert {path.suffix for path in done} == {".png"}
    assert run.left_behind() == []
    if number is signal.SIGINT:
        assert len(done) == (tmp_path / "report.json").read_text().count('"output"')
    run.go_on()
    if number is signal.SIGINT:  # and what came out of both halves is what one run makes
        whole = StoppedRun(command_line, tmp_path / "whole", "--eager", *slow)
        whole.go_on()
        for path in run.out.iterdir():
            assert difference(path, whole.out / path.name) <= 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_while_building(command_line: CommandLine, tmp_path: Path, number: signal.Signals) -> None:
    from tests.support.quick_builds import quick_builds

    store = tmp_path / "store"
    run = StoppedRun(command_line, tmp_path, "--store", store)
    run.stop_at("building graphs 2/", number)
    graphs = list((store / "graphs").iterdir())
    assert 2 <= len(graphs) < KINDS
    assert list(run.out.iterdir()) == []
    assert command_line("graphs", "verify", "--store", store).status == 0
    if number is signal.SIGKILL:
        BuildFolder(run.tmp).remove()  # the next build, wherever, clears up
    else:
        assert list((store / "tmp").iterdir()) == []
    assert run.left_behind() == []
    with quick_builds():
        out = run.go_on()
    assert f"{KINDS - len(graphs)} built, {len(graphs)} loaded" in out
    assert {path.name for path in (store / "locks").iterdir()} <= {"guard.lock"}


def test_what_a_killed_writer_left_goes(command_line: CommandLine, tmp_path: Path) -> None:
    run = StoppedRun(command_line, tmp_path, "--eager")
    run.out.mkdir()
    old, fresh, other = (
        run.out / f".{name}.tmp" for name in ("0123456789abcdef", "f" * 16, "notes")
    )
    for path in (old, fresh, other):
        path.write_bytes(b"half a picture")
    for path in (old, other):
        os.utime(path, (time.time() - 3600,) * 2)
    ended = command_line(*run.command)
    assert ended.status == 0
    assert not old.exists()
    assert fresh.exists()  # another run may be writing it just now
    assert other.exists()


def test_killed_while_writing_a_picture(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.command_line import in_child

    run = StoppedRun(command_line, tmp_path, "--eager")
    written: list[str] = []

    def kill_at_the_third(source: str, target: str) -> None:
        # Between the last byte and the moment in which the file appears.
        written.append(target)
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        os.rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(
            "onediff_ext.pictures.writing.os",
            SimpleNamespace(**{**vars(os), "replace": kill_at_the_third}),
        )
        assert in_child(lambda: command_line(*run.command).status) == -9
    assert len(list(run.out.glob("*.png"))) == 2
    (half,) = run.out.glob(".*.tmp")
    os.utime(half, (time.time() - 3600,) * 2)
    assert "2 pictures already done." in command_line(*run.command).out
    assert len(list(run.out.iterdir())) == COUNT
