"""One name of a model for page and command line, and what earlier versions wrote."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from onediff_ext.cli import img2img
from onediff_ext.cli.model_identity import model_identity as model_identity_of
from onediff_ext.core.options import precision_changes
from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
from onediff_ext.hosts.diffusers.jobs.img2img_job import Img2ImgJob, plan_job
from onediff_ext.hosts.diffusers.jobs.model_identity import (
    earlier_identities,
    model_identity,
)
from onediff_ext.pictures.batch.batch_job import BatchJob
from onediff_ext.pictures.size_rules import parse_size_rule
from onediff_ext.pictures.skipped import SkipReport
from onediff_ext.pictures.writing import write_png
from onediff_ext.store import ContentHashes, GraphLibrary

OF_THE_PAGE = {"checkpoint": "c" * 64, "loras": [], "dtype": "torch.float16"}
"""As version 0.2 of the page wrote it."""
OF_THE_COMMAND_LINE = {"checkpoint": "c" * 64, "vae": None, "loras": [], "dtype": "auto"}
"""As version 0.2 of the command line wrote it, and as both write it now."""


@pytest.fixture
def job(tmp_path: Path) -> Img2ImgJob:
    (tmp_path / "in").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "in" / "a.png")
    batch = BatchJob([tmp_path / "in"], tmp_path / "out", parse_size_rule("own"), seed=1)
    return Img2ImgJob(batch, DrawSettings(), dict(OF_THE_COMMAND_LINE))


def draw(job: Img2ImgJob) -> None:
    for result in plan_job(job, SkipReport()).todo:
        write_png(result.path, Image.new("RGB", (64, 64)), infotext="", digest=result.digest)


def is_done(job: Img2ImgJob) -> bool:
    return not plan_job(job, SkipReport()).todo


@pytest.fixture
def hashes(tmp_path: Path) -> ContentHashes:
    return ContentHashes(GraphLibrary(tmp_path / "store", limit_bytes=2**20).folder)


def test_names_are_those_of_the_command_line_so_far(hashes: ContentHashes, tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    model.write_bytes(b"model")
    found = model_identity(hashes, model)
    assert found == {**OF_THE_COMMAND_LINE, "checkpoint": hashes.content_hash(model)}
    assert model_identity(hashes, model, vae_tiling="auto") == found
    assert precision_changes("exact") == {}
    assert precision_changes("fp8") == {"precision": "fp8"}


OTHERS = [
    ["--vae-tiling=on"],
    ["--vae-tiling=off"],
    ["--precision=fp8"],
    ["--precision=fp8", "--ignore=unet"],
    ["--precision=fp8", "--ignore-vae"],
    ["--dtype=fp32"],
    ["--lora={lora}:0.8"],
    ["--lora={lora}:0.80000001"],
    ["--lora={lora}:0.8", "--lora={lora}:0.8"],
    ["--deepcache=3"],
    ["--deepcache=3 end=0.8000001"],
    ["--deepcache=3 end=0.8"],
    ["--step-cache=first-block:0.08"],
    ["--step-cache=first-block:0.08000001"],
    ["--guidance-steps=interval:0-0.6"],
    ["--guidance-steps=interval:0-0.60000001"],
    ["--guidance-steps=adaptive"],
    ["--size=scale:0.3333333"],
    ["--size=scale:0.33333333"],
    ["--scheduler=Euler"],
    ["--keep-alpha"],
]
"""Options of the command line, each of which makes other pictures than the others do."""
SAME = [
    ["--guidance-steps=interval:0-1"],
    ["--batch-size=2"],
    ["--ignore-vae"],
    ["--workers=2"],
    ["--build=wait"],
]


@pytest.fixture
def digest(tmp_path: Path) -> Callable[[list[str]], str]:
    """The digest of one picture's job with options of the command line."""
    for name in ("model", "lora"):
        (tmp_path / f"{name}.safetensors").write_bytes(name.encode())
    Image.new("RGB", (96, 96)).save(tmp_path / "a.png")
    parser = argparse.ArgumentParser()
    img2img.add_parser(parser.add_subparsers())
    common = [f"--{name}={tmp_path / name}" for name in ("store", "output")]
    common.append(f"--model={tmp_path / 'model.safetensors'}")

    def found(options: list[str]) -> str:
        words = [word.format(lora=tmp_path / "lora.safetensors") for word in options]
        arguments = parser.parse_args(["img2img", str(tmp_path / "a.png"), *common, *words])
        identity = model_identity_of(arguments, imports_here=False)
        job = img2img.make_job(arguments, identity)
        (result,) = plan_job(job, SkipReport()).todo
        return result.digest

    return found


def test_what_changes_pixels_is_part_of_the_digest(digest: Callable[[list[str]], str]) -> None:
    digests = [digest(options) for options in [[], *OTHERS]]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("options", SAME, ids=str)
def test_what_changes_no_pixel_is_none(
    options: list[str], digest: Callable[[list[str]], str]
) -> None:
    assert digest(options) == digest([])


@pytest.mark.parametrize("name", ["model", "lora"])
def test_the_content_of_files_is_part_of_the_digest(
    name: str, digest: Callable[[list[str]], str], tmp_path: Path
) -> None:
    before = digest(["--lora={lora}"])
    (tmp_path / f"{name}.safetensors").write_bytes(b"other")
    assert digest(["--lora={lora}"]) != before


def test_the_yaml_beside_a_checkpoint_is_part_of_it(hashes: ContentHashes, tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    for model, hints in ((one, "v"), (other, "eps")):
        model.write_bytes(b"model")
        model.with_suffix(".yaml").write_text(f"parameterization: {hints}")
    found = model_identity(hashes, one)
    assert found != model_identity(hashes, other)
    one.with_suffix(".yaml").unlink()
    # Nor was a picture without it drawn by what has it now.
    assert model_identity(hashes, one) not in earlier_identities(found, "torch.float16")


def test_a_folders_tokenizers_are_part_of_it(hashes: ContentHashes, tmp_path: Path) -> None:
    (tmp_path / "model" / "tokenizer").mkdir(parents=True)
    (tmp_path / "model" / "model_index.json").write_text("{}")
    merges = tmp_path / "model" / "tokenizer" / "merges.txt"
    found = []
    for text in ("a b", "b a"):
        merges.write_text(text)
        found.append(model_identity(hashes, tmp_path / "model"))
        assert found[-1] == model_identity(hashes, tmp_path / "model" / "model_index.json")
    assert found[0] != found[1]
    merges.unlink()
    assert earlier_identities(found[0]) == (model_identity(hashes, tmp_path / "model"),)


def test_results_of_an_earlier_page_are_done(job: Img2ImgJob) -> None:
    draw(replace(job, identity=dict(OF_THE_PAGE)))
    assert not is_done(job)
    assert is_done(replace(job, earlier=earlier_identities(job.identity, "torch.float16")))


def test_results_in_another_precision_are_not_done(job: Img2ImgJob) -> None:
    draw(replace(job, identity={**OF_THE_PAGE, "dtype": "torch.float32"}))
    assert not is_done(replace(job, earlier=earlier_identities(job.identity, "torch.float16")))


def test_results_of_an_earlier_command_line_are_done(job: Img2ImgJob) -> None:
    draw(replace(job, identity=dict(OF_THE_COMMAND_LINE)))
    assert is_done(job)


def test_earlier_names_of_what_the_page_could_not_draw() -> None:
    named = {**OF_THE_COMMAND_LINE, "dtype": "fp16"}
    assert earlier_identities(named) == (OF_THE_PAGE,)
    assert earlier_identities({**named, "precision": "fp8"}) == (
        {**OF_THE_PAGE, "precision": "fp8"},
    )
    assert earlier_identities(OF_THE_COMMAND_LINE) == ()  # only torch knows what it means
    assert earlier_identities({**named, "vae": "v" * 64}) == ()
    assert earlier_identities({**named, "config": "f" * 64}) == ()


@pytest.mark.parametrize("vae_tiling", ["on", "off"])
def test_tiles_of_the_vae_are_part_of_it(
    job: Img2ImgJob, hashes: ContentHashes, tmp_path: Path, vae_tiling: str
) -> None:
    """A result without tiles is not done for a run with them."""
    (tmp_path / "model.safetensors").write_bytes(b"model")
    without = replace(job, identity=model_identity(hashes, tmp_path / "model.safetensors"))
    draw(without)
    tiled = model_identity(hashes, tmp_path / "model.safetensors", vae_tiling=vae_tiling)
    asked = replace(job, identity=tiled, earlier=earlier_identities(tiled, "torch.float32"))
    assert not is_done(asked)
    draw(asked)
    assert is_done(asked)
    assert not is_done(without)
