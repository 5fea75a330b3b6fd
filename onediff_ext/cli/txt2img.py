"""``onediff-ext txt2img``: pictures from a prompt, at one or several sizes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.cli import draw_arguments, model_arguments, report_file
from onediff_ext.cli.progress import BuildListener, Progress
from onediff_ext.core.garbage_collection import without_collection
from onediff_ext.core.words import counted, printable

if TYPE_CHECKING:
    from onediff_ext.cli.model_arguments import LoadedModel
    from onediff_ext.core.shapes import BatchShape
    from onediff_ext.hosts.diffusers.drawing.image_generator import (
        Drawn,
        DrawSettings,
        ImageGenerator,
    )
    from onediff_ext.hosts.diffusers.jobs.run_report import RunReport


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("txt2img", help="draw pictures from a prompt")
    parser.add_argument(
        "--sizes", default="256x256", help='such as "512x768, 720x960@2" (@: pictures at once)'
    )
    parser.add_argument(
        "--count",
        type=model_arguments.positive_count,
        default=1,
        help="batches of each size (default: 1)",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("onediff-output"))
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what happened as JSON")
    draw_arguments.add_draw_arguments(parser, with_strength=False)
    model_arguments.add_model_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw; every picture gets the next seed. 1 when pictures had to be left out."""
    settings = draw_arguments.draw_settings(arguments)
    sizes = model_arguments.given_sizes(arguments.sizes)
    shapes = [shape for shape in sizes for _ in range(arguments.count)]
    identity = model_arguments.model_identity(arguments)

    with without_collection():
        from onediff_ext.hosts.diffusers.jobs.run_report import (
            ReuseCounter,
            RunReport,
            describe_device,
        )
        from onediff_ext.pictures.background_io import Writing
        from onediff_ext.pictures.writing import make_folder

    make_folder(arguments.output)
    report_file.check_report_path(arguments.report)

    def check(image_generator: ImageGenerator) -> None:
        image_generator.check_txt2img()
        image_generator.check(settings)

    model = model_arguments.load_model(arguments, identity, BuildListener(), check=check)
    image_generator, report = model.image_generator, RunReport(ready_seconds=model.ready_seconds)
    report.device = describe_device(image_generator.device)
    report.warnings = image_generator.ignored_text(settings)
    reuse = ReuseCounter(model.session)
    progress = Progress("pictures", sum(shape.batch for shape in shapes))
    seed = arguments.seed

    def write(shape: BatchShape, seeds: Sequence[int], drawn: Drawn) -> None:
        _write(arguments.output, model, settings, drawn, seeds, report)
        note = f"{shape.width_px}x{shape.height_px}, {drawn.seconds_per_step:.3f} s/step"
        progress.advance(shape.batch, note)

    try:
        with image_generator.one_job(), Writing() as writing:
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
    model.close()
    if arguments.report is not None:
        report_file.write_report(arguments.report, report)
    report_file.print_summary(report)
    print(printable(f"{counted(len(report.pictures), 'picture')} drawn, in {arguments.output}"))
    return 1 if report.skipped else 0


def _write(
    folder: Path,
    model: LoadedModel,
    settings: DrawSettings,
    drawn: Drawn,
    seeds: Sequence[int],
    report: RunReport,
) -> None:
    from onediff_ext.hosts.diffusers.jobs.img2img_job import infotext, lora_field
    from onediff_ext.hosts.diffusers.jobs.run_report import PictureResult
    from onediff_ext.pictures.writing import write_png

    for index, (image, seed) in enumerate(zip(drawn.images, seeds, strict=True)):
        if image is None:
            report.skipped.append({"input": f"seed {seed}", "reason": str(drawn.error(index))})
            continue
        path = _free(folder / f"{seed:05d}-{image.width}x{image.height}.png")
        text = infotext(model.image_generator, settings, seed, image, lora_field(model.identity))
        write_png(path, image, infotext=text, digest="")
        report.pictures.append(
            PictureResult(
                input="",
                output=str(path),
                width=image.width,
                height=image.height,
                seconds=drawn.seconds / len(seeds),
                seconds_per_step=drawn.seconds_per_step,
            )
        )


def _free(path: Path) -> Path:
    """A path that is not taken: nothing is overwritten."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free
