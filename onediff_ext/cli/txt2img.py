"""``onediff-ext txt2img``: pictures from a prompt, at one or several sizes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from onediff_ext.cli import draw_arguments, model_arguments, report_file
from onediff_ext.cli.progress import BuildListener, Progress


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("txt2img", help="draw pictures from a prompt")
    parser.add_argument(
        "--sizes", default="256x256", help='such as "512x768, 720x960@2" (@: pictures at once)'
    )
    parser.add_argument("--count", type=int, default=1, help="batches of each size")
    parser.add_argument("-o", "--output", type=Path, default=Path("onediff-output"))
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what happened as JSON")
    draw_arguments.add_draw_arguments(parser, with_strength=False)
    model_arguments.add_model_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw; every picture gets the next seed."""
    report_file.check_report_path(arguments.report)
    settings = draw_arguments.draw_settings(arguments)
    from onediff_ext.core.shapes import parse_sizes

    shapes = [shape for shape in parse_sizes(arguments.sizes) for _ in range(arguments.count)]
    identity = model_arguments.model_identity(arguments)
    model = model_arguments.load_model(arguments, identity, BuildListener())

    from onediff_ext.hosts.diffusers.img2img_job import infotext
    from onediff_ext.hosts.diffusers.report import (
        PictureResult,
        ReuseCounter,
        RunReport,
        describe_device,
    )
    from onediff_ext.pictures.writing import write_png

    report = RunReport(
        device=describe_device(model.painter.device), ready_seconds=model.ready_seconds
    )
    reuse = ReuseCounter(model.session)
    progress = Progress("pictures", sum(shape.batch for shape in shapes))
    seed = arguments.seed
    for shape in shapes:
        had = reuse.before()
        seeds = range(seed, seed + shape.batch)
        drawn = model.painter.txt2img(settings, shape.width_px, shape.height_px, seeds)
        report.reused += reuse.after(shape.width_px, shape.height_px, had)
        for image, picture_seed in zip(drawn.images, seeds, strict=True):
            path = arguments.output / f"{picture_seed:05d}-{image.width}x{image.height}.png"
            path = _free(path)
            text = infotext(model.painter, settings, picture_seed, image, {})
            write_png(path, image, infotext=text, digest="")
            report.pictures.append(
                PictureResult(
                    input="",
                    output=str(path),
                    width=image.width,
                    height=image.height,
                    seconds=drawn.seconds / shape.batch,
                    seconds_per_step=drawn.seconds_per_step,
                )
            )
        seed += shape.batch
        note = f"{shape.width_px}x{shape.height_px}, {drawn.seconds_per_step:.3f} s/step"
        progress.advance(shape.batch, note)
    progress.close()
    report.take_session(model.session, model.painter.device)
    if arguments.report is not None:
        report_file.write_report(arguments.report, report)
    report_file.print_summary(report)
    print(f"{len(report.pictures)} pictures in {arguments.output}")
    return 0


def _free(path: Path) -> Path:
    """A path that is not taken: nothing is overwritten."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free
