"""`onediff-ext txt2img`: sizes, seeds and names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from onediff_ext.hosts.diffusers.jobs import txt2img_results
from onediff_ext.pictures.infotext_format import parse_infotext
from onediff_ext.pictures.writing import write_png
from tests.support.command_line import KINDS
from tests.support.sample_pictures import difference, infotext_of

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine

pytest_plugins = ("tests.support.command_line",)


@pytest.fixture
def draw(command_line: CommandLine, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def draw(output: Path, *options: object) -> dict[str, Any]:
        report = tmp_path / "report.json"
        command = ["txt2img", "-o", output, "--steps", "2", "--report", report, *options]
        ended = command_line(*command)
        assert ended.status == 0, ended
        loaded: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        assert f"{len(loaded['pictures'])} picture" in ended.out
        return loaded

    return draw


def test_sizes_and_seeds(draw: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    options = ("--sizes", "64x64, 72x96@2", "--seed", "5", "-p", "a fox")
    report = draw(tmp_path / "out", *options)
    names = [Path(picture["output"]).name for picture in report["pictures"]]
    assert names == ["00005-64x64.png", "00006-72x96.png", "00007-72x96.png"]
    assert report["graphs"] == {"built": 0, "loaded": KINDS, "reused": 2 * KINDS}
    assert report["fallbacks"] == []
    for picture in report["pictures"]:
        with Image.open(picture["output"]) as image:
            assert image.size == (picture["width"], picture["height"])
        assert picture["input"] == ""
    fields = parse_infotext(infotext_of(tmp_path / "out" / names[2])).fields
    assert (fields["Seed"], fields["Size"]) == ("7", "72x96")

    alone = draw(tmp_path / "alone", "--sizes", "72x96", "--seed", "7", "-p", "a fox", "--eager")
    drawn = Path(alone["pictures"][0]["output"])
    assert difference(drawn, tmp_path / "out" / names[2]) <= 1
    assert difference(drawn, tmp_path / "out" / names[1]) > 8


def test_two_runs_into_one_folder_at_the_same_time(
    draw: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other run's picture appears when this one has chosen its names and not yet written them.
    compose = txt2img_results.compose_infotext
    other = tmp_path / "out" / "00000-64x64.png"

    def other_run_is_first(*arguments: Any) -> str:
        write_png(other, Image.new("RGB", (64, 64)), infotext="a dog", digest="another run")
        return compose(*arguments)

    monkeypatch.setattr(txt2img_results, "compose_infotext", other_run_is_first)
    report = draw(other.parent, "--sizes", "64x64", "-p", "a fox", "--eager")
    [ours] = [Path(picture["output"]) for picture in report["pictures"]]
    assert infotext_of(other) == "a dog"
    assert infotext_of(ours).startswith("a fox")


def test_nothing_is_overwritten(draw: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    options = ("--sizes", "64x64", "--count", "2", "--eager")
    for _ in range(2):
        draw(tmp_path, *options)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "00000-64x64-2.png",
        "00000-64x64.png",
        "00001-64x64-2.png",
        "00001-64x64.png",
    ]


def test_more_at_once_than_graphs_take(draw: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    report = draw(tmp_path / "out", "--sizes", "64x64@32", "--steps", "1")
    assert len(report["pictures"]) == 32
    assert {entry["reason"] for entry in report["fallbacks"]} == {"more than 63 images at once"}


def test_lora_in_infotext(
    draw: Callable[..., dict[str, Any]], command_line: CommandLine, tmp_path: Path
) -> None:
    lora = command_line.lora("kohya")
    report = draw(tmp_path, "--sizes", "64x64", "--eager", "--lora", f"{lora}:0.5")
    text = infotext_of(Path(report["pictures"][0]["output"]))
    assert f'Lora: "{lora.stem}:0.5:' in text


def test_deepcache_in_infotext_where_it_was_used(
    draw: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    options = ("--sizes", "64x64", "--eager", "--deepcache", "3")
    few = draw(tmp_path / "few", *options)
    assert "DeepCache needs 10 steps" in few["warnings"][0]
    assert "DeepCache" not in infotext_of(Path(few["pictures"][0]["output"]))
    enough = draw(tmp_path / "enough", *options, "--steps", "10")
    assert enough["warnings"] == []
    fields = parse_infotext(infotext_of(Path(enough["pictures"][0]["output"]))).fields
    assert fields["OneDiff DeepCache"] == "medium"


def test_guidance_steps_in_infotext_where_they_change_the_picture(
    draw: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    options = ("--sizes", "64x64", "--eager", "--steps", "4", "-p", "a fox")
    half = ("--guidance-steps", "interval:0-0.5")
    whole = draw(tmp_path / "whole", *options)
    part = draw(tmp_path / "part", *options, *half)
    none = draw(tmp_path / "none", *options, *half, "--guidance", "1")
    paths = [Path(report["pictures"][0]["output"]) for report in (whole, part, none)]
    fields = [parse_infotext(infotext_of(path)).fields for path in paths]
    named = [each.get("OneDiff guidance steps") for each in fields]
    assert named == [None, "interval:0-0.5", None]
    assert part["warnings"] == []
    assert none["warnings"] == [
        "A CFG scale of 1 has no guidance to leave out; guidance steps are ignored."
    ]
    assert Image.open(paths[0]).tobytes() != Image.open(paths[1]).tobytes()


def test_not_enough_memory(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from onediff_ext.hosts.diffusers.drawing.image_generator import ImageGenerator

    def refuse(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(ImageGenerator, "txt2img", refuse)
    ended = command_line("txt2img", "-o", tmp_path, "--sizes", "64x64", "--eager")
    assert ended.status == 2
    assert ended.said == [
        "onediff-ext: There is not enough memory.",
        "  Use smaller sizes, fewer at once, or close other programs.",
    ]
