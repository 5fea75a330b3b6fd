"""The tab "Batch" on several GPUs: the command line's run beside the page, with its progress."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from onediff_ext.core.demo_files import DEMO_MODEL
from onediff_ext.core.errors import OneDiffError, OptionError
from onediff_ext.core.options import CompileOptions
from onediff_ext.panel.choices import Choices

pytest.importorskip("gradio", reason="the page needs gradio, which is not installed")
pytest.importorskip("diffusers", reason="the page draws with diffusers, which is not installed")

from onediff_ext.cli import img2img
from onediff_ext.cli.cluster_arguments import prepare_workers
from onediff_ext.cli.main import make_parser
from onediff_ext.cli.model_arguments import parse_ignored_components, parse_options
from onediff_ext.cli.model_identity import model_identity
from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.core.step_cache_options import StepCacheOptions
from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
from onediff_ext.hosts.diffusers.jobs.img2img_job import Img2ImgJob
from onediff_ext.panel import gpu_choices
from onediff_ext.panel.gpu_choices import ALL, ONE
from onediff_ext.pictures.batch.batch_job import BatchJob
from onediff_ext.pictures.size_rules import parse_size_rule
from onediff_ext.standalone.app import CancelledError, StandaloneApp
from onediff_ext.standalone.folder_job import run_folder
from onediff_ext.standalone.folder_on_gpus import img2img_command, run_folder_on_gpus
from onediff_ext.standalone.folder_progress import FolderProgress, progress_html
from tests.support.processes import processes_with

EAGER = Choices(enabled=False)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneApp]:
    import torch

    options = CompileOptions(store=tmp_path_factory.mktemp("store"), build="never")
    app = StandaloneApp(torch.device("cpu"), "auto", options)
    app.load(DEMO_MODEL)
    yield app
    app.close()


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "-in"  # a name that looks like an option
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64 + 8 * (number % 2)), (50 * number, 90, 10)).save(
            folder / f"{number}.png"
        )
    return folder


def job_of(app: StandaloneApp, inputs: Path, steps: int = 2, **batch: Any) -> Img2ImgJob:
    of_batch = BatchJob(
        [inputs],
        inputs.parent / "out",
        parse_size_rule("own"),
        seed=5,
        batch_size=1,
        **batch,
    )
    return Img2ImgJob(of_batch, DrawSettings("a fox", steps=steps, strength=1.0), app.identity)


def parsed(words: list[str]) -> argparse.Namespace:
    arguments: argparse.Namespace = make_parser().parse_args(words)
    return arguments


def test_the_command_does_the_same_job(app: StandaloneApp, inputs: Path) -> None:
    choices = Choices(
        enabled=True,
        preset="Custom",
        components=("UNet",),
        vae="ignore encoder",
        precision="fp8",
        deepcache="3",
    )
    batch = BatchJob(
        [inputs, inputs.parent],
        inputs.parent / "out",
        parse_size_rule("longest:768:shrink"),
        seed=7,
        vary_seed=True,
        batch_size=3,
        recursive=True,
        captions=True,
        keep_alpha=True,
    )
    settings = DrawSettings(
        "--eager, a fox",
        "-ugly",
        steps=11,
        guidance=3.5,
        strength=0.35,
        scheduler="DPM++ 2M Karras",
        deepcache=DeepCacheOptions.parse("3"),
        step_cache=StepCacheOptions.parse("first-block:0.08"),
        guidance_steps=GuidanceOptions.parse("interval:0.1-0.65"),
    )
    identity = {**app.identity, **choices.changes()}
    arguments = parsed(img2img_command(app, choices, Img2ImgJob(batch, settings, identity), ALL))
    assert arguments.gpus == "all"
    assert prepare_workers(arguments)
    made = img2img.make_job(arguments, model_identity(arguments))
    assert made.settings == settings
    assert {**vars(made.batch), "name_template": 0} == {**vars(batch), "name_template": 0}
    assert made.batch.name_template.text == batch.name_template.text
    # DeepCache counts once, in the settings.
    assert {**made.identity, "deepcache": identity["deepcache"]} == identity
    assert parse_ignored_components(arguments) == choices.ignores
    options = parse_options(arguments)
    assert (options.precision, options.build) == ("fp8", "never")
    assert options.store == app.options.store
    assert not arguments.eager


def test_without_the_panel_the_command_is_eager(app: StandaloneApp, inputs: Path) -> None:
    arguments = parsed(img2img_command(app, EAGER, job_of(app, inputs), "2"))
    assert arguments.eager
    assert arguments.gpus == "2"


def test_a_choice_without_an_option_is_refused(app: StandaloneApp, inputs: Path) -> None:
    choices = Choices(enabled=True, preset="Custom", captures=False)
    with pytest.raises(OptionError, match="CUDA graphs"):
        img2img_command(app, choices, job_of(app, inputs), "2")


@pytest.mark.parametrize(
    ("gpus", "choices"), [(0, [ONE]), (1, [ONE]), (2, [ONE, ALL]), (4, [ONE, "2", "3", ALL])]
)
def test_the_field_has_what_the_machine_has(
    monkeypatch: pytest.MonkeyPatch, gpus: int, choices: list[str]
) -> None:
    monkeypatch.setattr(gpu_choices, "gpu_count", lambda: gpus)
    assert gpu_choices.gpu_choices() == choices


@pytest.mark.parametrize(("gpus", "is_shown"), [(1, False), (2, True)])
def test_the_field_is_shown_with_a_second_gpu_only(
    app: StandaloneApp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, is_shown: bool
) -> None:
    from onediff_ext.standalone.launch import make_page

    monkeypatch.setattr(gpu_choices, "gpu_count", lambda: gpus)
    field = make_page(app, tmp_path).folder["gpus"]
    assert field.visible is is_shown


def test_without_ray_the_field_says_what_to_install(
    app: StandaloneApp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from onediff_ext.standalone.launch import make_page

    monkeypatch.setattr(gpu_choices, "gpu_count", lambda: 2)
    monkeypatch.setitem(sys.modules, "ray", None)
    field = make_page(app, tmp_path).folder["gpus"]
    assert field.interactive is False
    assert 'pip install "onediff-ext[cluster]"' in field.info


def test_a_folder_on_two_workers(app: StandaloneApp, inputs: Path) -> None:
    pytest.importorskip("ray", reason="the extra cluster is not installed")
    job = job_of(app, inputs)
    shown = list(run_folder_on_gpus(app, EAGER, job, "2"))
    last = shown[-1]
    assert (last.done, last.needed, last.skipped) == (4, 4, [])
    assert sorted(last.paths) == sorted((inputs.parent / "out").glob("*.png"))
    assert [row[0] for row in last.workers] == ["worker-1", "worker-2"]
    assert sum(int(str(row[3])) for row in last.workers) == 4
    assert not app.is_busy
    one = replace(job, batch=replace(job.batch, output_dir=inputs.parent / "one"))
    list(run_folder(app, EAGER, one))
    for path in last.paths:
        assert Image.open(path).tobytes() == Image.open(one.batch.output_dir / path.name).tobytes()
    again = list(run_folder(app, EAGER, job))
    assert (again[-1].needed, again[-1].already_done) == (0, 4)


def test_an_error_of_the_run_is_shown(app: StandaloneApp, inputs: Path) -> None:
    job = job_of(app, inputs)
    job.batch.output_dir.write_text("a file where the folder should be")
    with pytest.raises(OneDiffError, match="out"):
        list(run_folder_on_gpus(app, EAGER, job, "2"))
    assert not app.is_busy


def test_names_in_an_error_of_the_run_are_read_as_they_were_written(
    app: StandaloneApp, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")  # as Windows' Python writes into files
    job = job_of(app, inputs)
    output = inputs.parent / "Übersicht"
    output.write_text("a file where the folder should be")
    with pytest.raises(OneDiffError, match="Übersicht"):
        list(
            run_folder_on_gpus(
                app, EAGER, replace(job, batch=replace(job.batch, output_dir=output)), "2"
            )
        )


def test_an_interrupt_ends_the_run_and_its_processes(
    app: StandaloneApp, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="the extra cluster is not installed")
    monkeypatch.setenv("ONEDIFF_TEST_RUN", str(inputs))
    progress = run_folder_on_gpus(app, EAGER, job_of(app, inputs, steps=300), "2")
    next(progress)
    threading.Timer(8.0, app.cancel).start()  # Ray has started, or is starting
    with pytest.raises(CancelledError):
        list(progress)
    assert not app.is_busy
    ends_at = time.monotonic() + 20
    while left := processes_with("ONEDIFF_TEST_RUN", inputs):
        assert time.monotonic() < ends_at, left
        time.sleep(0.1)


def test_the_table_of_workers_is_escaped() -> None:
    from onediff_ext.panel.phrases import ENGLISH

    progress = FolderProgress(1, 2, titles=["worker"], workers=[["<script>"]])
    assert "&lt;script&gt;" in progress_html(progress, ENGLISH)
    assert "<script>" not in progress_html(progress, ENGLISH)
