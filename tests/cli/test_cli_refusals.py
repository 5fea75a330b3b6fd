"""Impossible requests are refused at once: one sentence, the next step, exit status 2."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from onediff_ext.core.errors import OptionError
from tests.support import adapter_weights, models
from tests.support.sample_pictures import save_pictures

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine

pytest_plugins = ("tests.support.command_line",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_pictures(tmp_path / "in", a=(64, 64))


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (["--scheduler", "Eular"], "no sampler 'Eular'", "Did you mean: Euler"),
        (["--size", "banana"], '"banana" is not a sizing rule', "longest:768"),
        (["--size", "fixed:0x64"], "a side must be from 1", "fixed:512x512"),
        (["--size", "scale:nan"], "the factor must be", "scale:0.5"),
        (["--steps", "0"], "0 steps cannot be drawn", "1 to 1000"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'", "img2img --help"),
        (["--strength", "0"], "strength of 0.0", "up to 1"),
        (["--strength", "nan"], "strength of nan", "up to 1"),
        (["--guidance", "-1"], "guidance of -1.0", "0 to 100"),
        (["--prompt", "a caf\udce9"], "prompt is no text", "UTF-8"),
        (["--negative-prompt", "\ud800"], "negative prompt is no text", "UTF-8"),
        (["--steps", "3", "--strength", "0.3"], "less than one step", "at least 4 steps"),
        (["--steps", "1", "--strength", "0.5"], "less than one step", "at least 2 steps"),
        (["--steps", "9", "--strength", "0.1"], "less than one step", "at least 10 steps"),
        (["--guidance-steps", "0.6"], "no guidance steps '0.6'. Use off, interval:0-0.6", "--help"),
        (["--guidance-steps", "interval:1-0"], "computed from 1 to 0", "--help"),
        (["--seed", "-1"], "argument --seed: '-1' is not a whole number from 0", "--help"),
        (["--seed", "9" * 20], "is not a whole number from 0", "--help"),
        (["--batch-size", "0"], "1 to 31", "--batch-size"),
        (["--max-megapixels", "inf"], "argument --max-megapixels", "--help"),
        (["--name", "{foo}"], 'unknown field "{foo}"', "{stem}"),
        (["--name", "../a"], "leads out of the output folder", "without .."),
        (["--device", "tpu"], "Device 'tpu' cannot be used", "cuda:N"),
        (["--device", "meta"], "Device 'meta' cannot be used", "cuda:N"),
        (["--device", "cuda:99"], "torch sees no GPU 'cuda:99'", "doctor"),
        (["--workers", "0"], "argument --workers: '0'", "--help"),
        (["--store-limit-gb", "nan"], "argument --store-limit-gb: 'nan'", "--help"),
        (["--store-limit-gb", "1e308"], "argument --store-limit-gb: '1e308'", "--help"),
        (["--store-limit-gb", "0"], "argument --store-limit-gb: '0' is not above zero", "--help"),
        (["--vae-tiling", "much"], "argument --vae-tiling: invalid choice: 'much'", "--help"),
        (["--backend", "magic"], "argument --backend: invalid choice: 'magic'", "--help"),
        (["--config", "no"], "There is no folder no", "diffusers folder"),
        (["--lora", ":0.5"], "':0.5' names no LoRA file", "FILE.safetensors:0.8"),
        (["--lora", ""], "'' names no LoRA file", "FILE.safetensors:0.8"),
        (["--lora", "no.safetensors"], "There is no file no.safetensors", "nothing is downloaded"),
        (["-m", "no.safetensors"], "There is no file no.safetensors", "nothing is downloaded"),
        (["--report", "/no/such/report.json"], "/no/such/report.json cannot be written", "folder"),
        (["--ignore", "unet", "--ignore-vae"], "no component to compile", "`ignores`"),
    ],
)  # fmt: skip
def test_options(
    command_line: CommandLine, folder: Path, options: list[str], message: str, hint: str
) -> None:
    ended = command_line("img2img", folder, "-o", folder.parent / "out", *options)
    ended.refused(message, hint)
    assert ended.out == ""
    assert list(folder.parent.glob("out/*")) == []


@pytest.mark.parametrize("command", ["img2img", "txt2img"])
def test_a_sampler_is_refused_before_anything_is_built(
    command_line: CommandLine, folder: Path, command: str
) -> None:
    what = [folder] if command == "img2img" else ["--sizes", "64x64"]
    output, store = folder.parent / "out", folder.parent / "store"
    for sampler, message in (
        ("DDIM Karras", "DDIM cannot use the schedule type Karras"),
        ("DPM++ SDE", "needs the package torchsde"),
    ):
        if sampler == "DPM++ SDE" and importlib.util.find_spec("torchsde"):
            continue
        options = ("-o", output, "--scheduler", sampler, "--store", store)
        command_line(command, *what, *options).refused(message)
    assert not (store / "graphs").exists() or not list((store / "graphs").iterdir())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
@pytest.mark.parametrize("what", ["pipe", "endless", "loop", "long"])
@pytest.mark.parametrize("option", ["-m", "--lora", "--vae"])
def test_what_is_no_file_is_not_waited_for(
    command_line: CommandLine, folder: Path, option: str, what: str
) -> None:
    path = folder.parent / f"{what}.safetensors"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "endless":
        path.symlink_to("/dev/zero")
    elif what == "loop":
        path.symlink_to(path)
    else:
        path = folder / ("x" * 300)
    message = {"pipe": "is a pipe", "endless": "is a device", "loop": "cannot be read"}
    command = ("img2img", folder, "-o", folder.parent / "out", option, path)
    command_line(*command).refused(message.get(what, "File name too long"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_pictures_and_captions_that_are_no_files_are_left_out(
    command_line: CommandLine, tmp_path: Path
) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64), b=(64, 64), c=(64, 64))
    os.mkfifo(folder / "pipe.png")
    (folder / "endless.png").symlink_to("/dev/zero")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    os.mkfifo(folder / "b.txt")
    (folder / "c.txt").symlink_to("/dev/zero")
    out = tmp_path / "out"
    ended = command_line(
        "img2img", folder, "-o", out, "--eager", "--captions", "--steps", "2", "--strength", "0.5"
    )
    assert ended.status == 1
    assert [path.name for path in out.glob("*.png")] == ["a.png"]
    for name in ("pipe.png", "endless.png", "b.png", "c.png"):
        assert f"{name}:" in ended.err


@pytest.mark.parametrize(
    "name", ["\x1b[2J\x1b]0;x\x07", "a\u202eb", "\udcff", "a\nb\rc", "\x9b31m"]
)
def test_what_is_printed_cannot_command_the_terminal(
    command_line: CommandLine, tmp_path: Path, name: str
) -> None:
    folder = save_pictures(tmp_path / "in", a=(64, 64))
    (folder / f"{name}.png").write_bytes(b"no picture")
    out = tmp_path / f"{name} out"
    drawn = command_line(
        "img2img", folder, "-o", out, "--eager", "--steps", "2", "--strength", "0.5"
    )
    assert drawn.status == 1
    for ended in (
        drawn,
        command_line("img2img", folder, "-m", tmp_path / name),
        command_line("img2img", folder, "--size", name),
        command_line("img2img", folder, "--lora", f"x:{name}"),
        command_line("img2img", tmp_path / name),
        command_line(name),
        command_line("warmup", name),
    ):
        text = ended.out + ended.err
        assert text.isprintable() or set(text) - {"\n"} == {c for c in text if c.isprintable()}
        text.encode("utf-8")


def test_no_such_input(command_line: CommandLine, tmp_path: Path) -> None:
    ended = command_line("img2img", tmp_path / "nowhere", "-o", tmp_path / "out")
    ended.refused(f"There is no {tmp_path / 'nowhere'}", "Check the name")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["img2img", ""], "FOLDER"),
        (["img2img", "in", "-o", ""], "-o/--output"),
        (["img2img", "in", "--store", ""], "--store"),
        (["warmup", "--from", ""], "--from"),
        (["doctor", "--store", ""], "--store"),
        (["txt2img", "--cluster", "auto", "--graphs", ""], "--graphs"),
        (["demo", ""], "FOLDER"),
        (["ui", "--output", ""], "-o/--output"),
        (["graphs", "list", "--store", ""], "--store"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    command_line: CommandLine,
    words: list[str],
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as of a shell's variable that is not set."""
    monkeypatch.chdir(tmp_path)
    ended = command_line(*words)
    ended.refused(f"argument {option}: the path is empty", "--help")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["img2img", "in", "--sise", "own"], "img2img: unrecognized", "Did you mean --size? See"),
        (["img2img", "in", "--stpes=4"], "img2img: unrecognized", "Did you mean --steps? See"),
        (
            ["doctor", "zzz"],
            "onediff-ext doctor: unrecognized",
            "  See `onediff-ext doctor --help`",
        ),
        (
            ["graphs", "list", "--jsno"],
            "graphs list: unrecognized",
            "onediff-ext graphs list --help",
        ),
    ],
)
def test_an_unknown_option_leads_to_the_help_of_its_command(
    command_line: CommandLine, words: list[str], message: str, hint: str
) -> None:
    command_line(*words).refused(message, hint)


def test_no_command(command_line: CommandLine) -> None:
    command_line("nonsense").refused("invalid choice: 'nonsense'", "onediff-ext --help")


def test_no_demo_model(
    command_line: CommandLine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onediff_ext.cli import model_identity

    missing = folder / "demo.safetensors"
    monkeypatch.setattr(model_identity, "DEMO_MODEL", missing)
    ended = command_line("img2img", folder, "-m", missing)
    ended.refused("This installation has no demo model", "--model")


@pytest.mark.parametrize("blocked", ["file", "below a file", "/proc/new"])
def test_output_folder_that_cannot_be_made(
    command_line: CommandLine, folder: Path, blocked: str
) -> None:
    place = {"file": folder / "a.png", "below a file": folder / "a.png" / "out"}
    output = place.get(blocked, Path("/proc/new"))
    if blocked == "/proc/new" and not Path("/proc").is_dir():
        pytest.skip("needs /proc")
    for command in (["img2img", folder], ["txt2img", "--sizes", "64x64"]):
        ended = command_line(*command, "-o", output)
        ended.refused(f"{output} cannot be written", "another output folder")
        assert "graphs" not in ended.err  # said before anything is loaded or built


def test_a_store_that_is_a_file(command_line: CommandLine, folder: Path) -> None:
    """`doctor` takes it, and says what is wrong with it (`test_cli_graphs.py`)."""
    file = folder / "a.png"
    for command in (
        ["img2img", folder, "-o", folder.parent / "out"],
        ["txt2img", "--sizes", "64x64", "-o", folder.parent / "out"],
        ["graphs", "list"],
    ):
        ended = command_line(*command, "--store", file)
        ended.refused(f"argument --store: {file} is a file, not a folder", f"{command[0]}")
    assert not (folder.parent / "out").exists()


def test_reports_that_cannot_be_written(command_line: CommandLine, folder: Path) -> None:
    for command, option in (
        (["img2img", folder], "--report"),
        (["txt2img", "--sizes", "64x64"], "--report"),
        (["bench", "--sizes", "64x64"], "--json"),
    ):
        out = [] if command[0] == "bench" else ["-o", folder.parent / "out"]
        for path in (folder, folder / "no" / "r.json"):
            ended = command_line(*command, *out, option, path)
            ended.refused(f"The report {path} cannot be written", "ame a file")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes and links in folders")
def test_a_report_takes_the_place_of_files_only(tmp_path: Path) -> None:
    from onediff_ext.cli.report_file import check_report_path, write_json

    pipe, link, target = (tmp_path / name for name in ("pipe", "link", "target"))
    os.mkfifo(pipe)
    target.write_text("mine")
    link.symlink_to(target)
    for path, kind in ((pipe, "a pipe"), (link, "a link")):
        with pytest.raises(OptionError, match=kind):
            check_report_path(path)
    # What somebody else has put where the report is made first.
    (tmp_path / "report.json.part").symlink_to(target)
    check_report_path(tmp_path / "report.json")
    (tmp_path / "report.json.part").symlink_to(target)
    write_json(tmp_path / "report.json", {"a": 1})
    assert json.loads((tmp_path / "report.json").read_text()) == {"a": 1}
    assert target.read_text() == "mine"
    assert not list(tmp_path.glob("*.part"))


def test_checkpoints(command_line: CommandLine, folder: Path, tmp_path: Path) -> None:
    def refused(model: Path, message: str, hint: str) -> None:
        out = tmp_path / "out"
        for options in ([], ["--eager"]):
            ended = command_line("img2img", folder, "-o", out, "-m", model, *options)
            ended.refused(message, hint)

    whole = command_line.checkpoint().read_bytes()
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole[: len(whole) // 2])
    refused(cut, "is cut short", "Download the file again")
    cut.write_bytes(b"")
    refused(cut, "is empty", "Download the file again")
    pickle = tmp_path / "model.ckpt"
    pickle.write_bytes(b"PK\3\4")
    refused(pickle, "is a pickle", ".safetensors version")
    refused(folder / "a.png", "not a safetensors file", "Choose")
    refused(folder, "holds no .safetensors", "diffusers layout")
    refused(command_line.lora("kohya"), "is a LoRA, not a checkpoint", "Choose a checkpoint first")


def test_loras(command_line: CommandLine, folder: Path, tmp_path: Path) -> None:
    def refused(lora: object, message: str, hint: str) -> None:
        out = tmp_path / "out"
        command_line("img2img", folder, "-o", out, "--lora", lora).refused(message, hint)

    refused(f"{command_line.lora('kohya')}:strong", "'strong' is no LoRA weight", ":0.8")
    refused(command_line.lora("kohya", "sdxl"), "LoRA for another text encoder", "this kind")
    refused(command_line.checkpoint(), "is a checkpoint, not a LoRA", "Choose a LoRA")
    wide = adapter_weights.save_lora(
        models.sd15(context_dim=96), tmp_path / "wide.safetensors", text=False
    )
    refused(wide, "LoRA for a text context 96 wide", "this kind")
    pickle = tmp_path / "lora.pt"
    shutil.copy(command_line.lora("kohya"), pickle)
    refused(pickle, "is a pickle", ".safetensors version")


def test_text_to_image(command_line: CommandLine, tmp_path: Path) -> None:
    def refused(message: str, hint: str, *options: object) -> None:
        command_line("txt2img", "-o", tmp_path / "out", *options).refused(message, hint)

    refused('"65x64" cannot be generated', "nearest size is 64x64", "--sizes", "65x64")
    refused('"big" is not a size', "512x768", "--sizes", "big")
    refused("No size is given", "512x768", "--sizes", " ")
    refused("argument --count: '0'", "--help", "--sizes", "64x64", "--count", "0")
    for name in ("sd15_inpaint", "sdxl_refiner"):
        model = ("-m", command_line.checkpoint(name), "--store", tmp_path / "store")
        refused("cannot draw from text alone", "Use img2img", "--sizes", "64x64", *model)
    assert not list((tmp_path / "store").glob("graphs/*"))  # said before anything was built


def test_other_commands(command_line: CommandLine, folder: Path, tmp_path: Path) -> None:
    def refused(message: str, hint: str, *command: object) -> None:
        command_line(*command).refused(message, hint)

    (tmp_path / "empty").mkdir()
    refused("no picture in", "another folder", "warmup", "--from", tmp_path / "empty")
    refused("argument --rounds: '0'", "bench --help", "bench", "--rounds", "0")
    refused("No graph begins with 'zzz'", "graphs list", "graphs", "explain", "zzz")
    refused("graphs begins with ''", "graphs list", "graphs", "explain", "")
    refused("There is no folder", "Name another", "graphs", "export", tmp_path / "no" / "g.zip")
    refused("No checkpoint 'x'", "Known: ", "graphs", "export", "g.zip", "--checkpoint", "x")
    refused("cannot be read", "file's name", "graphs", "import", tmp_path / "g.zip", "--trust")
    refused("not a sound archive", "Export", "graphs", "import", folder / "a.png", "--trust")
    refused("--older-than-days: 'nan'", "--help", "graphs", "prune", "--older-than-days", "nan")
    refused("--to-gb: '-1'", "--help", "graphs", "prune", "--to-gb", "-1")


def test_unreadable_files(command_line: CommandLine, folder: Path, tmp_path: Path) -> None:
    (folder / "link.png").symlink_to(tmp_path / "gone.png")
    (folder / "folder.png").mkdir()
    Image.new("RGB", (64, 64)).save(folder / "b.png")
    options = ("--steps", "1", "--strength", "1", "--eager")
    ended = command_line("img2img", folder, "-o", tmp_path / "out", *options)
    assert ended.status == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.png", "b.png"]
    assert [line.rpartition("/")[2] for line in ended.said] == [
        "folder.png: It is a folder, not a picture.",
        "link.png: It is a link to a file that is not there.",
    ]
