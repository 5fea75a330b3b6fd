"""``onediff-ext txt2img``: images from a prompt, at one or several sizes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.cli import report_file
from onediff_ext.cli.argument_types import picture_path, positive_count, required_sizes
from onediff_ext.cli.cluster_arguments import add_cluster_arguments
from onediff_ext.cli.draw_arguments import add_draw_arguments, draw_settings
from onediff_ext.cli.model_arguments import add_model_arguments
from onediff_ext.cli.model_identity import model_identity
from onediff_ext.cli.model_loading import load_model
from onediff_ext.cli.progress import BuildProgressBars, Progress
from onediff_ext.core.garbage_collection import without_collection
from onediff_ext.core.start_up_times import process_started_at, seconds_since
from onediff_ext.core.words import counted, printable

if TYPE_CHECKING:
    from onediff_ext.cli.model_loading import LoadedModel
    from onediff_ext.cli.workers_ahead import WorkersAhead
    from onediff_ext.core.shapes import BatchShape
    from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
    from onediff_ext.hosts.diffusers.drawing.image_generator import Drawn, ImageGenerator
    from onediff_ext.hosts.diffusers.jobs.run_report import RunReport


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("txt2img", help="draw pictures from a prompt")
    parser.add_argument(
        "--sizes",
        default="256x256",
        help='such as "512x768, 720x960@2" (@: pictures at once; default: %(default)s)',
    )
    parser.add_argument(
        "--count",
        type=positive_count,
        default=1,
        help="batches of each size (default: 1)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=picture_path,
        default=Path("onediff-output"),
        help="folder or URL of the pictures (default: %(default)s)",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what happened as JSON")
    add_draw_arguments(parser, with_strength=False)
    add_model_arguments(parser)
    add_cluster_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw; every image gets the next seed. 1 when images failed."""
    from onediff_ext.cli.workers_ahead import workers_ahead

    with workers_ahead(arguments) as ahead:
        return _run(arguments, ahead)


def _run(arguments: argparse.Namespace, ahead: WorkersAhead | None) -> int:
    settings = draw_settings(arguments)
    sizes = required_sizes(arguments.sizes)
    shapes = [shape for shape in sizes for _ in range(arguments.count)]
    identity = model_identity(arguments, imports_here=ahead is None)
    if ahead is not None:
        ahead.identity = identity

    with without_collection():
        from onediff_ext.hosts.diffusers.jobs.run_report import (
            ReuseCounter,
            RunReport,
            describe_device,
        )
        from onediff_ext.pictures.batch.background_io import BackgroundWriter
        from onediff_ext.pictures.writing import make_folder

    make_folder(arguments.output)
    report_file.check_report_path(arguments.report)
    if ahead is not None:
        return _run_in_workers(arguments, settings, identity, shapes, ahead)

    def check(image_generator: ImageGenerator) -> None:
        image_generator.check_txt2img()
        image_generator.check(settings)

    model = load_model(arguments, identity, BuildProgressBars(), check=check)
    image_generator, report = model.image_generator, RunReport(ready_seconds=model.ready_seconds)
    report.device = describe_device(image_generator.device)
    report.warnings = image_generator.ignored_text(settings)
    reuse = ReuseCounter(model.session)
    progress = Progress("pictures", sum(shape.batch for shape in shapes))
    seed = arguments.seed

    def write(shape: BatchShape, seeds: Sequence[int], drawn: Drawn) -> None:
        _write(arguments.output, shape, model, settings, drawn, seeds, report)
        note = f"{shape.width_px}x{shape.height_px}, {drawn.seconds_per_step:.3f} s/step"
        progress.advance(shape.batch, note)
        model.times.mark("first picture")

    try:
        with image_generator.one_job(), BackgroundWriter() as writing:
            for shape in shapes:
                had = reuse.before()
                seeds = range(seed, seed + shape.batch)
                drawn = image_generator.txt2img(settings, shape.width_px, shape.height_px, seeds)
                report.take_notes(drawn.notes)
                report.reused += reuse.after(shape.width_px, shape.height_px, had)
                writing.put(partial(write, shape, seeds, drawn))
                seed += shape.batch
    except BaseException:
        progress.close()
        report.take_session(model.session, image_generator.device)
        model.close()
        report_file.write_what_happened(arguments.report, report)
        report_file.print_left_out(report)
        raise
    progress.close()
    report.take_session(model.session, image_generator.device)
    report.start_up = seconds_since(process_started_at(), model.times.steps)
    model.leave()
    if arguments.report is not None:
        report_file.write_report(arguments.report, report)
    report_file.print_summary(report)
    print(printable(f"{counted(len(report.pictures), 'picture')} drawn, in {arguments.output}"))
    return 1 if report.skipped else 0


def _run_in_workers(
    arguments: argparse.Namespace,
    settings: DrawSettings,
    identity: dict[str, object],
    shapes: Sequence[BatchShape],
    ahead: WorkersAhead,
) -> int:
    from onediff_ext.cli.cluster_run import run_txt2img_on_workers
    from onediff_ext.hosts.diffusers.jobs.run_report import RunReport
    from onediff_ext.pictures.skipped import SkipReport

    report, skipped = RunReport(), SkipReport()
    try:
        run_txt2img_on_workers(arguments, settings, identity, shapes, report, skipped, ahead=ahead)
    finally:
        report.skipped = skipped.as_json()
        report_file.write_what_happened(arguments.report, report)
    report_file.print_summary(report)
    print(printable(f"{counted(len(report.pictures), 'picture')} drawn, in {arguments.output}"))
    return 1 if report.skipped else 0


def _write(
    folder: Path,
    shape: BatchShape,
    model: LoadedModel,
    settings: DrawSettings,
    drawn: Drawn,
    seeds: Sequence[int],
    report: RunReport,
) -> None:
    from onediff_ext.hosts.diffusers.jobs.txt2img_results import result_path, write_results

    paths = [result_path(folder, seed, shape.width_px, shape.height_px) for seed in seeds]
    written = write_results(model.image_generator, settings, model.identity, drawn, seeds, paths)
    for seed, result in zip(seeds, written, strict=True):
        if isinstance(result, Exception):
            report.skipped.append({"input": f"seed {seed}", "reason": str(result)})
        else:
            report.pictures.append(result)
