"""A worker draws with the files that the run was started with, or not at all."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from onediff_ext.cli import txt2img
from onediff_ext.cli.cluster_arguments import prepare_workers
from onediff_ext.cli.cluster_programs import Txt2ImgProgram
from onediff_ext.cli.draw_arguments import draw_settings
from onediff_ext.cli.model_identity import SameFiles, model_identity
from onediff_ext.cluster.worker import Worker
from onediff_ext.core.errors import CheckpointError
from onediff_ext.pictures.writing import unfinished_names
from onediff_ext.store import default_root
from onediff_ext.store.default_root import ROOT_VARIABLE
from onediff_ext.store.permissions import TRUST_VARIABLE

if TYPE_CHECKING:
    from tests.support.command_line import CommandLine

pytest_plugins = ("tests.support.command_line",)


def parsed(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    txt2img.add_parser(parser.add_subparsers())
    return parser.parse_args(["txt2img", "-p", "a fox", *map(str, words)])


def make_files(folder: Path) -> tuple[Path, Path]:
    folder.mkdir()
    model, lora = folder / "model.safetensors", folder / "lora.safetensors"
    model.write_bytes(b"weights" * 100)
    lora.write_bytes(b"adapter" * 100)
    for path in (model, lora):
        os.utime(path, ns=(1_000_000_000, 1_000_000_000))
    return model, lora


def test_a_relative_store_of_the_environment_is_the_same_in_other_current_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers inherit the environment, and start in an empty folder that is deleted at the end."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ROOT_VARIABLE, "graphs")
    monkeypatch.setenv(TRUST_VARIABLE, "graphs")
    assert prepare_workers(parsed("-m", "model.safetensors", "--gpus", "1"))
    os.chdir(elsewhere)
    assert default_root() == tmp_path / "graphs"
    assert os.environ[TRUST_VARIABLE] == str(tmp_path / "graphs")
    monkeypatch.setenv(ROOT_VARIABLE, "~/graphs")  # of each machine's own user
    assert prepare_workers(parsed("-m", "model.safetensors", "--gpus", "1"))
    assert os.environ[ROOT_VARIABLE] == "~/graphs"


@pytest.mark.parametrize("changed", ["checkpoint", "loras", "yaml"])
def test_the_same_paths_with_other_contents_are_noticed(tmp_path: Path, changed: str) -> None:
    model, lora = make_files(tmp_path / "files")
    arguments = parsed("-m", model, "--lora", lora, "--store", tmp_path / "store")
    identity = model_identity(arguments, imports_here=False)
    SameFiles(arguments, identity).check()

    path = {"checkpoint": model, "loras": lora, "yaml": model.with_suffix(".yaml")}[changed]
    path.write_bytes(b"other" * 140)

    with pytest.raises(CheckpointError, match=rf"another file .*differs: {changed}") as caught:
        SameFiles(arguments, identity).check()
    assert "all machines share" in caught.value.hint


def test_a_machine_without_a_store_of_its_own_hashes_again(tmp_path: Path) -> None:
    model, lora = make_files(tmp_path / "files")
    arguments = parsed("-m", model, "--lora", lora, "--store", tmp_path / "store")
    identity = model_identity(arguments, imports_here=False)

    arguments.store = tmp_path / "another machine"

    SameFiles(arguments, identity).check()


def test_settings_that_are_no_files_do_not_count(tmp_path: Path) -> None:
    model, _ = make_files(tmp_path / "files")
    arguments = parsed("-m", model, "--store", tmp_path / "store")
    identity = model_identity(arguments, imports_here=False)
    SameFiles(arguments, {**identity, "dtype": "fp32", "precision": "fp8"}).check()


def test_a_worker_with_another_checkpoint_under_the_path_refuses(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished_names, "run", "")  # a worker names its whole process
    model = tmp_path / "model.safetensors"
    shutil.copy(command_line.checkpoint(), model)
    arguments = parsed("-m", model, "--store", tmp_path / "store", "--eager", "--device", "cpu")
    identity = model_identity(arguments, imports_here=False)
    program = Txt2ImgProgram(arguments, draw_settings(arguments), identity, "0" * 8)
    about, error = Worker("same").open(program, None)
    assert error is None
    assert about is not None

    shutil.copy(command_line.checkpoint(seed=1), model)

    about, error = Worker("other").open(program, None)
    assert about is None
    assert isinstance(error, CheckpointError)
    assert "another file" in error.message
