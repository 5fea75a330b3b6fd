"""Disks that are full, limited or read-only during a run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.command_line import KINDS
from tests.support.sample_pictures import save_pictures
from tests.support.systems import needs_fork

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine

pytest_plugins = ("tests.support.command_line",)

pytestmark = pytest.mark.starts_workers

FEW = ("--steps", "1", "--strength", "1")


@cache
def why_no_mounts() -> str:
    """Why this process cannot mount a small disk of its own; "" if it can."""
    if shutil.which("unshare") is None:
        return "needs the command unshare"
    trial = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True
    )
    return f"cannot mount: {trial.stderr.strip()}" if trial.returncode else ""


@pytest.fixture
def on_a_disk(command_line: CommandLine, tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Runs a shell script in which $DISK can be mounted and `onediff-ext` is the command line."""
    if reason := why_no_mounts():
        pytest.skip(reason)

    def on_a_disk(script: str) -> tuple[str, str]:
        from tests.support.command_line import ROOT

        disk = tmp_path / "disk"
        disk.mkdir()
        called = f'onediff_ext() {{ "{sys.executable}" -m onediff_ext "$@"; }}\n'
        done = subprocess.run(
            ["unshare", "-m", "bash", "-c", called + script],
            capture_output=True,
            text=True,
            timeout=240,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "DISK": str(disk),
                "MODEL": f"-m {command_line.checkpoint()}",
                "STORE": str(command_line.store),
            },
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return on_a_disk


def full_disk(name: str, calls: int) -> Any:
    """The module `os` for one module: a function of it finds the disk full after some calls."""
    left = iter(range(calls))

    def failing(*args: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return getattr(os, name)(*args, **options)

    return SimpleNamespace(**{**vars(os), name: failing})


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_disk_full_while_writing_pictures(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    folder = save_pictures(tmp_path / "in", **dict.fromkeys("abcdef", (64, 64)))
    out, report = tmp_path / "out", tmp_path / "report.json"
    command = ("img2img", folder, "-o", out, "--eager", "--report", report, *FEW)
    with monkeypatch.context() as patch:
        patch.setattr("onediff_ext.pictures.writing.os", full_disk(call, 3))
        ended = command_line(*command)
    ended.refused("cannot be written (No space left on device)", "it goes on here")
    done = sorted(path.name for path in out.iterdir())
    # A picture takes two calls of fsync: for itself and for its folder, where it may fail.
    assert done == ["a.png", "b.png", "c.png"][: 3 if call == "replace" else 2]
    pictures = json.loads(report.read_text())["pictures"]
    assert [Path(picture["output"]).name for picture in pictures] == done
    again = command_line(*command)
    assert again.status == 0
    assert len(list(out.iterdir())) == 6
    assert f"{len(done)} picture" in again.out
    assert [path.name for path in tmp_path.iterdir() if ".part" in path.name] == []


def test_the_first_error_is_the_one_that_is_shown(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64))
    monkeypatch.setattr("onediff_ext.pictures.writing.os", full_disk("replace", 0))
    monkeypatch.setattr("onediff_ext.cli.report_file.os", full_disk("replace", 0))
    report = tmp_path / "report.json"
    command = ("img2img", folder, "-o", tmp_path / "out", "--eager", "--report", report, *FEW)
    ended = command_line(*command)
    assert ended.status == 2
    assert ended.said[0].startswith(f"The report {report} cannot be written")
    assert ended.said[1].startswith("onediff-ext: ")
    assert "a.png cannot be written" in ended.said[1]
    assert "it goes on here" in ended.said[2]


def test_file_size_limit(command_line: CommandLine, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(200, 200))
    out = tmp_path / "out"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # b.png has more

    ended = command_line.process("img2img", folder, "-o", out, "--eager", *FEW, preexec_fn=limit)
    ended.refused("b.png cannot be written (File too large)", "another output folder")
    assert [path.name for path in out.iterdir()] == ["a.png"]


def test_graphs_serve_although_they_cannot_be_kept(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.quick_builds import quick_builds

    folder, store = save_pictures(tmp_path / "in", a=(64, 64)), tmp_path / "store"
    report = tmp_path / "report.json"
    command = ("img2img", folder, "-o", tmp_path / "out", "--report", report, *FEW)
    with monkeypatch.context() as patch, quick_builds():
        patch.setattr("onediff_ext.store.atomic_write.os", full_disk("replace", 5))
        ended = command_line(*command, store=store)
    assert ended.status == 0, ended
    what = json.loads(report.read_text())
    assert what["graphs"]["built"] == KINDS
    assert what["fallbacks"] == []
    (warning,) = what["warnings"]  # one for all graphs
    assert "Graphs are not kept: There is no space left in" in warning
    assert "graphs prune" in warning
    kept = len(list((store / "graphs").iterdir()))
    assert 0 < kept < 6
    assert list((store / "tmp").iterdir()) == []
    with quick_builds():
        again = command_line(*command, "--seed", "1", store=store)
    # The disk may have been full between the last graph and the record that it can be loaded.
    loaded = [n for n in (kept, kept - 1) if f"{KINDS - n} built, {n} loaded" in again.out]
    assert len(loaded) == 1, again.out


def test_a_disk_that_is_really_full(
    on_a_disk: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    sizes = {f"p{n}": (64, 64 + 8 * n) for n in range(6)}
    folder = save_pictures(tmp_path / "in", **sizes)
    out, err = on_a_disk(f"""
        mount -t tmpfs -o size=48k none $DISK
        run="onediff_ext img2img {folder} -o $DISK/out --eager $MODEL --store $STORE
             --report $DISK/report.json {" ".join(FEW)}"
        $run; echo "status $?"; ls -A $DISK/out
        mount -o remount,size=4m $DISK
        $run; echo "status $?"; ls -A $DISK/out | wc -l; ls -A $DISK
    """)
    first, second = out.split("status ")[0:2], out.split("status ")[2]
    assert first[1].startswith("2\n")
    written = first[1].splitlines()[1:]
    done = [line for line in written if line.endswith(".png")]
    assert 0 < len(done) < 6
    assert done == [f"p{n}.png" for n in range(len(done))]
    assert not any(".tmp" in line for line in written)
    assert "cannot be written (No space left on device)" in err
    assert f"{len(done)} picture" in written[-1] or f"{len(done)} picture" in out
    assert second.splitlines() == ["0", "6", "out", "report.json"]


def test_a_disk_that_is_read_only(
    on_a_disk: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64))
    out, err = on_a_disk(f"""
        run="onediff_ext img2img {folder} --backend eager $MODEL {" ".join(FEW)}"
        mount --bind $STORE $DISK && mount -o remount,ro,bind $DISK
        $run -o {tmp_path}/stored --store $DISK; echo "status $?"
        onediff_ext doctor --store $DISK | grep store; echo "status ${{PIPESTATUS[0]}}"
        onediff_ext graphs prune --to-gb 0 --store $DISK; echo "status $?"
        $run -o $DISK/out --store $DISK; echo "status $?"
    """)
    stored, doctor, prune, output = out.split("status ")[:4]
    assert f"0 built, {KINDS} loaded" in stored
    assert "cannot be written: new graphs are not kept" in doctor
    assert [line[:1] for line in out.split("status ")[1:]] == ["0", "1", "2", "2"]
    assert prune.strip() == "1"
    assert output.strip() == "2"
    lines = [line for line in err.splitlines() if not line.startswith(("building", "pictures"))]
    assert "Read-only file system" in lines[0]  # of prune: the run with stored graphs said nothing
    assert "disk/out cannot be written (Read-only file system)." in lines[2]
    assert "another output folder" in lines[3]
    assert len(lines) == 4


@needs_fork
def test_stores_that_belong_to_somebody_else(command_line: CommandLine, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become somebody else")
    from onediff_ext.building.build_folder import BuildFolder
    from tests.support.command_line import in_child
    from tests.support.quick_builds import quick_builds

    folder = save_pictures(tmp_path / "in", a=(64, 64))
    with quick_builds():
        # All modules are imported afterwards, since somebody else may not read them.
        assert command_line("img2img", folder, "-o", tmp_path / "ours", *FEW).status == 0
    readable = [tmp_path, folder, *folder.iterdir(), *command_line.store.parent.rglob("*")]
    for path in (*readable, *tmp_path.parents, *command_line.store.parents):
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)

    def draw(store: Path) -> str:
        def as_somebody_else() -> int:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with quick_builds():
                ended = command_line(
                    "img2img", folder, "-o", theirs / store.parent.name, *FEW, store=store
                )
            (theirs / "said").write_text(ended.out + ended.err)
            return ended.status

        assert in_child(as_somebody_else) == 0, (theirs / "said").read_text()
        assert (theirs / store.parent.name / "a.png").stat().st_uid == 65534
        return (theirs / "said").read_text()

    ours = BuildFolder()  # which somebody else cannot even look into
    stored = draw(command_line.store)
    assert ours.path.exists()
    ours.remove()
    assert f"0 built, {KINDS} loaded" in stored
    assert "cannot" not in stored
    missing = draw(tmp_path / "no-store")
    assert f"{KINDS} built, 0 loaded" in missing
    assert missing.count("Graphs are not kept: ") == 2  # at once, and again at the end
    assert "no-store cannot be written (Permission denied). Make the folder writable" in missing


@pytest.mark.parametrize("call", ["mkdtemp", "Popen"])
def test_builds_that_cannot_start_leave_pictures_eager(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    import tempfile

    module = {"mkdtemp": tempfile, "Popen": subprocess}[call]

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = save_pictures(tmp_path / "in", a=(64, 64))
    broken = SimpleNamespace(**{**vars(module), call: fail})
    monkeypatch.setattr(f"onediff_ext.building.worker_process.{module.__name__}", broken)
    command = ("img2img", folder, "-o", tmp_path / "out", *FEW)
    ended = command_line(*command, store=tmp_path / "store")
    assert ended.status == 0, ended
    assert "No space left on device" in ended.out
    assert (tmp_path / "out" / "a.png").exists()
