"""The command line as a process: what it prints where, how fast, with which exit status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import models
from tests.support.command_line import KINDS
from tests.support.sample_pictures import save_pictures

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine

pytest_plugins = ("tests.support.command_line",)

PICTURE_LINE = re.compile(r"pictures \d+/\d+: \d+x\d+, \d+\.\d{3} s/step(, \d+ (s|min) left)?")


def test_plain_lines_and_no_chatter(command_line: CommandLine, tmp_path: Path) -> None:
    pipe = models.sd15()
    pipe.save_pretrained(tmp_path / "model")
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(72, 64))
    # A folder and two LoRAs: where diffusers, transformers and peft have most to say.
    lora = command_line.lora("kohya")
    ended = command_line.process(
        "img2img", folder, "-o", tmp_path / "out", "-m", tmp_path / "model", "--steps", "2",
        "--strength", "1", "--lora", lora, "--lora", lora, "-p", "fox " * 100,
    )  # fmt: skip
    assert ended.status == 0, ended
    assert ended.said == ["warning: The prompt has 100 tokens; what comes after 75 is ignored."]
    lines = ended.err.splitlines()[:-1]
    assert len(lines) == 2
    assert all(PICTURE_LINE.fullmatch(line) for line in lines), lines
    assert "left" in lines[0]
    assert "left" not in lines[1]
    assert ended.out.splitlines() == [
        f"graphs: 0 built, {KINDS} loaded, {2 * KINDS} reused at new sizes; 0 recompiles",
        f"2 pictures drawn, in {tmp_path / 'out'}",
    ]


def test_names_that_the_output_s_encoding_lacks(command_line: CommandLine, tmp_path: Path) -> None:
    """Windows redirects output in the code page of the machine, without such letters."""
    folder = save_pictures(tmp_path / "фото", **{"кот→日本": (64, 64)})
    (folder / "плохо.png").write_bytes(b"no picture")
    ended = command_line.process(
        "img2img", folder, "-o", tmp_path / "из", "--eager", "--steps", "2",
        env={"PYTHONIOENCODING": "cp1252:strict"},
    )  # fmt: skip
    assert ended.status == 1, ended
    assert "Traceback" not in ended.err
    assert r"\u043f\u043b\u043e\u0445\u043e.png: The file is not a picture" in ended.err
    assert [path.name for path in (tmp_path / "из").iterdir()] == ["кот→日本.png"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals, so a POSIX system")
def test_bars_on_a_terminal(command_line: CommandLine, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(72, 64))
    ours, theirs = os.openpty()
    process = command_line.spawn(
        "img2img", folder, "-o", tmp_path / "out", "--eager", "--steps", "2", "--strength", "1",
        stderr=theirs, env={"COLUMNS": "100", "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # Linux says so when the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "2 pictures drawn" in out
    text = shown.decode()
    assert re.search(r"pictures: +100%\|.*\| 2/2 \[.*72x64, 0\.\d{3} s/step", text), text
    assert not PICTURE_LINE.search(text)


def test_help_is_quick(command_line: CommandLine) -> None:
    seconds = []
    for command in ([], ["img2img"], ["graphs", "prune"]):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "onediff_ext", *command, "--help"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0
        assert done.stdout.startswith("usage: onediff-ext")
        assert done.stderr == ""
    assert min(seconds) < 1, seconds


def test_a_reader_that_goes_away(command_line: CommandLine) -> None:
    process = command_line.spawn("graphs", "list", stdin=subprocess.DEVNULL)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) in (0, 1)


def test_verbose_says_why_graphs_are_built(command_line: CommandLine, tmp_path: Path) -> None:
    for where in (["-v", "warmup", "64x64"], ["warmup", "64x64", "-v"]):
        arguments = command_line.arguments(*where[-2:] if where[0] == "-v" else where)
        arguments += ["--no-build", "--ignore-vae", "--dtype", "bf16"]
        command = [*where[:1], *arguments] if where[0] == "-v" else arguments
        from tests.support.command_line import run_here

        ended = run_here(command)
        reasons = [line for line in ended.said if line.startswith("missing: ")]
        assert len(reasons) == 9
        assert all("bfloat16" in line for line in reasons), reasons


def test_the_end_looks_through_nothing(tmp_path: Path) -> None:
    script = f"""
import atexit, gc
atexit.register(lambda: print("frozen:", gc.get_freeze_count() > 0))
from onediff_ext.cli.main import main
assert main(["graphs", "list", "--store", {str(tmp_path)!r}]) == 0
assert gc.get_freeze_count() == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "frozen: True"


def test_nothing_is_collected_while_the_checkpoint_is_loaded(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gc

    from onediff_ext.hosts.diffusers.checkpoints import load
    from onediff_ext.hosts.diffusers.drawing.image_generator import ImageGenerator

    collecting = []
    own_open, own_draw = load.open_tensor_file, ImageGenerator.txt2img

    def noted_open(path: Path) -> object:
        collecting.append(gc.isenabled())
        return own_open(path)

    def noted_draw(image_generator: ImageGenerator, *arguments: object) -> object:
        collecting.append(gc.isenabled())
        return own_draw(image_generator, *arguments)

    monkeypatch.setattr(load, "open_tensor_file", noted_open)
    monkeypatch.setattr(ImageGenerator, "txt2img", noted_draw)
    few = ("--sizes", "64x64", "--steps", "1", "--eager")
    assert command_line("txt2img", "-o", tmp_path, *few).status == 0
    assert collecting == [False, True]


def test_libraries_are_imported_while_a_checkpoint_is_hashed(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onediff_ext.cli import library_imports
    from onediff_ext.store import ContentHashes

    importing, met = threading.Event(), []
    own_hash, own_import = ContentHashes.content_hash, library_imports.import_libraries

    def slow_hash(hashes: ContentHashes, path: Path) -> str:
        met.append(importing.wait(20))
        return own_hash(hashes, path)

    def noted_import() -> None:
        importing.set()
        own_import()

    monkeypatch.setattr(ContentHashes, "content_hash", slow_hash)
    monkeypatch.setattr(library_imports, "import_libraries", noted_import)
    few = ("--sizes", "64x64", "--steps", "1", "--eager")
    assert command_line("txt2img", "-o", tmp_path / "out", *few).status == 0
    assert met == [True, True]  # the checkpoint, and the .yaml beside it


def test_a_run_with_nothing_to_do_imports_no_libraries(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64))
    command = ("img2img", folder, "-o", tmp_path / "out", "--steps", "2", "--eager")
    assert command_line(*command).status == 0
    monkeypatch.setattr("onediff_ext.cli.library_imports.import_libraries", lambda: 1 / 0)
    assert "1 picture already done." in command_line(*command).out
