"""The command line with a small Flux.1: a folder of diffusers, and a single file beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import save_file

from onediff_ext.pictures.infotext_format import parse_infotext
from tests.support import transformer_models as models
from tests.support.command_line import run_here
from tests.support.quick_builds import quick_builds
from tests.support.sample_pictures import difference, infotext_of
from tests.support.transformer_files import diffusers_file
from tests.support.transformer_folders import save_folder

KINDS = 2  # of the transformer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder, and its graphs in the folder "store" beside it."""
    made = save_folder("flux", tmp_path_factory.mktemp("models") / "flux")
    with quick_builds():
        warm = run_here(
            ["warmup", "64x64", "72x96@2", "-m", str(made), "--backend", "eager", "--ignore-vae",
             "--store", str(made.parent / "store")]
        )  # fmt: skip
    assert warm.status == 0, warm
    assert f"{KINDS} graphs built, 0 loaded" in warm.out
    return made


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a command that draws, and return its report."""

    def run(*command: object, model: Path = folder) -> dict[str, Any]:
        report = tmp_path / "report.json"
        given = (
            "-m", model, "--steps", 4, "-p", "a fox", "--seed", 5, "--report", report,
            "--store", folder.parent / "store",
        )  # fmt: skip
        graphs = ("--ignore-vae", "--backend", "eager", "--build", "wait")
        compiled = () if "--eager" in command else graphs
        ended = run_here([str(word) for word in (*command, *given, *compiled)])
        assert ended.status == 0, ended
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found

    return run


def check(report: dict[str, Any], sizes: list[tuple[int, int]]) -> list[Path]:
    """Check that the warm-up's graphs drew everything; returns the pictures."""
    assert (report["graphs"]["built"], report["graphs"]["loaded"]) == (0, KINDS)
    assert report["fallbacks"] == []
    paths = sorted(Path(picture["output"]) for picture in report["pictures"])
    for path, size in zip(paths, sizes, strict=True):
        with Image.open(path) as image:
            assert image.size == size
    return paths


def test_text_to_image(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    command = ("txt2img", "--sizes", "72x64, 96x96@2")
    paths = check(run(*command, "-o", tmp_path / "out"), [(72, 64), (96, 96), (96, 96)])
    fields = parse_infotext(infotext_of(paths[0])).fields
    assert fields["Distilled CFG Scale"] == "3.5"
    (eager,) = run("txt2img", "--sizes", "72x64", "-o", tmp_path / "eager", "--eager")["pictures"]
    assert difference(Path(eager["output"]), paths[0]) <= 1

    cached = ("--step-cache", "first-block:0.9", "-o", tmp_path / "cached")
    paths = check(run("txt2img", "--sizes", "72x64", *cached), [(72, 64)])
    assert parse_infotext(infotext_of(paths[0])).fields["OneDiff step cache"] == "first-block:0.9"
    assert difference(Path(eager["output"]), paths[0]) > 1


def test_guidance_steps_are_refused_before_anything_is_drawn(folder: Path, tmp_path: Path) -> None:
    words = ["txt2img", "--sizes", "64x64", "-m", str(folder), "--eager", "-o", str(tmp_path)]
    ended = run_here([*words, "--guidance-steps", "adaptive"])
    ended.refused("FluxPipeline is not known to draw prompt and negative prompt", "SD3")
    assert list(tmp_path.iterdir()) == []


def test_image_to_image_goes_on_where_it_stopped(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    pictures, out = tmp_path / "in", tmp_path / "out"
    pictures.mkdir()
    for name, size in (("a", (88, 64)), ("b", (64, 72)), ("c", (88, 64))):
        Image.effect_noise(size, 60).convert("RGB").save(pictures / f"{name}.png")
    command = ("img2img", pictures, "-o", out, "--strength", 0.5)
    paths = check(run(*command), [(88, 64), (64, 72), (88, 64)])
    paths[0].unlink()
    again = run(*command)
    assert [Path(picture["output"]) for picture in again["pictures"]] == [paths[0]]


def test_a_single_file_beside_the_folder(
    run: Callable[..., dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    """It has its own pictures, through the same graphs."""
    file, rest = tmp_path / "tuned.safetensors", tmp_path / "rest"
    save_file(diffusers_file(models.flux_transformer(seed=9)), file)
    shutil.copytree(folder, rest, ignore=shutil.ignore_patterns("diffusion_pytorch_model*"))
    shutil.copytree(folder / "vae", rest / "vae", dirs_exist_ok=True)
    command = ("txt2img", "--sizes", "72x64", "-o")
    (plain,) = check(run(*command, tmp_path / "plain"), [(72, 64)])
    (tuned,) = check(run(*command, tmp_path / "tuned", "--config", rest, model=file), [(72, 64)])
    assert difference(plain, tuned) > 8
    assert parse_infotext(infotext_of(tuned)).fields["Model"] == "tuned"
