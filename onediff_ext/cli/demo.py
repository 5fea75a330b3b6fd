"""``onediff-ext demo``: the main job on the photographs that ship with the package."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.cli import img2img, model_arguments, report_file
from onediff_ext.cli.progress import BuildListener, Progress
from onediff_ext.cli.tables import format_table
from onediff_ext.core.words import printable

if TYPE_CHECKING:
    from onediff_ext.hosts.diffusers.drawing.image_generator import ImageGenerator
    from onediff_ext.hosts.diffusers.jobs.img2img_job import BatchDone, Img2ImgJob
    from onediff_ext.hosts.diffusers.jobs.run_report import ReuseCounter, RunReport
    from onediff_ext.session.session import Session

# What the demo checkpoint draws from text alone: prompt, width and height in pixels.
PROMPTS = (
    ("a fox in the snow", 192, 192),
    ("a cat and a rocket on a yellow background", 256, 128),
    ("two apples", 128, 192),
    ("an octopus under the sea", 256, 192),
    ("a castle at sunset", 192, 128),
)
PHOTOS = Path(__file__).resolve().parent.parent / "assets" / "photos"


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "demo",
        help="run the main job on sample photographs, eager beside compiled",
        description="Takes the options of img2img.",
    )
    parser.add_argument("inputs", nargs="*", type=Path, metavar="FOLDER")
    img2img.add_arguments(parser)
    parser.set_defaults(
        build="wait",
        run=run,
        output=Path("demo-output"),
        prompt="a cat on a yellow background",
        captions=True,
        steps=16,
        strength=0.65,
        guidance=4.0,
        scheduler="DPM++ 2M Karras",
        size=None,
        batch_size=2,
    )


def run(arguments: argparse.Namespace) -> int:
    """Draw everything eager, then compiled; print a table and where the pictures are."""
    report_file.check_report_path(arguments.report)
    arguments.inputs = arguments.inputs or sorted(PHOTOS.glob("*.jpg"))
    identity = model_arguments.model_identity(arguments)
    model_arguments.import_libraries()
    image_generator = model_arguments.load_painter(arguments)
    if arguments.size is None:
        arguments.size = "own" if image_generator.device.type == "cuda" else "scale:0.375"
    job = img2img.make_job(arguments, identity)

    drawn = [("eager", _draw_prompts(job, "eager", image_generator))]
    eager_report, _ = _run(job, "eager", image_generator, None)
    session = None
    if not arguments.eager:
        session, start = _compile(image_generator, arguments, identity)
        drawn.append(("compiled", _draw_prompts(job, "compiled", image_generator)))
        report, reuse = _run(job, "compiled", image_generator, session)
        report.ready_seconds = start
    else:
        report, reuse = eager_report, None
    if arguments.report is not None:
        report_file.write_report(arguments.report, report)
    print()
    print(printable(f"{report.device}, {image_generator.checkpoint.name}, sizes: {arguments.size}"))
    print(_table(eager_report, report, reuse))
    report_file.print_summary(report)
    if session is not None:
        store = session.library.folder.root
        print(printable(f"graphs ready after {report.ready_seconds:.1f} s; kept in {store}"))
    sheet = _contact_sheet(job, drawn, eager_report, report)
    print(printable(f"pictures: {job.output_dir}; all of them together: {sheet}"))
    return 0


def _draw_prompts(job: Img2ImgJob, name: str, image_generator: ImageGenerator) -> list[Path]:
    """Text to image at a few sizes; nothing for a checkpoint that needs a picture."""
    from onediff_ext.core.errors import OptionError
    from onediff_ext.hosts.diffusers.jobs.img2img_job import infotext
    from onediff_ext.pictures.writing import write_png

    paths: list[Path] = []
    for number, (prompt, width, height) in enumerate(PROMPTS):
        settings = dataclasses.replace(job.settings, prompt=prompt)
        try:
            image = image_generator.txt2img(settings, width, height, [job.seed]).images[0]
        except OptionError:
            return []
        if image is not None:
            paths.append(job.output_dir / name / f"txt2img-{number}.png")
            text = infotext(image_generator, settings, job.seed, image, {})
            write_png(paths[-1], image, infotext=text, digest="")
    return paths


def _contact_sheet(
    job: Img2ImgJob, drawn: list[tuple[str, list[Path]]], eager: RunReport, compiled: RunReport
) -> Path:
    """Pictures from text, then photographs with their results below each other."""
    from onediff_ext.pictures.contact_sheet import make_contact_sheet, stack

    sheets = []
    if all(paths for _, paths in drawn):
        rows = [(f"text to image, {name}", paths) for name, paths in drawn]
        sheets.append(make_contact_sheet(rows))
    by_input = {picture.input: picture.output for picture in compiled.pictures}
    pairs = [(p.input, p.output, by_input[p.input]) for p in eager.pictures if p.input in by_input]
    if pairs:
        columns = zip(*pairs, strict=True)
        labels = ("photograph", "image to image, eager", "image to image, compiled")
        sheets.append(
            make_contact_sheet(
                [
                    (label, [Path(path) for path in paths])
                    for label, paths in zip(labels, columns, strict=True)
                ]
            )
        )
    path = job.output_dir / "contact-sheet.jpg"
    stack(sheets).save(path, quality=90)
    return path


def _compile(
    image_generator: ImageGenerator, arguments: argparse.Namespace, identity: dict[str, object]
) -> tuple[Session, float]:
    import time

    start = time.perf_counter()
    session = model_arguments.open_session(arguments, identity)
    model_arguments.compile_painter(image_generator, arguments, session, BuildListener())
    return session, time.perf_counter() - start


def _run(
    job: Img2ImgJob, name: str, image_generator: ImageGenerator, session: Session | None
) -> tuple[RunReport, ReuseCounter]:
    from onediff_ext.hosts.diffusers.jobs.img2img_job import plan_job, run_job
    from onediff_ext.hosts.diffusers.jobs.run_report import RunReport, describe_device
    from onediff_ext.pictures.skipped import Report

    # Times are what the demo is about, so nothing of an earlier demo is taken over.
    identity = {**job.identity, "demo": id(job)}
    job = dataclasses.replace(job, output_dir=job.output_dir / name, identity=identity)
    skipped, report = Report(), RunReport(device=describe_device(image_generator.device))
    plan = plan_job(job, skipped)
    progress = Progress(f"{name} pictures", len(plan.todo))

    def show(batch: BatchDone) -> None:
        note = f"{batch.width_px}x{batch.height_px}, {batch.drawn.seconds_per_step:.3f} s/step"
        progress.advance(len(batch.outputs), note)

    try:
        reuse = run_job(job, plan, image_generator, report, skipped, session=session, on_batch=show)
    finally:
        progress.close()
    report.take_session(session, image_generator.device)
    report.skipped = skipped.as_json()
    return report, reuse


def _table(eager: RunReport, compiled: RunReport, reuse: ReuseCounter | None) -> str:
    """One row for each size of result."""
    before, after = _by_size(eager), _by_size(compiled)
    rows = []
    for size, seconds in before.items():
        eager_s, fast_s = statistics.median(seconds), statistics.median(after[size])
        graphs = reuse.by_size.get(_canvas(size)) if reuse else None
        counts = [graphs[n] for n in ("built", "loaded", "reused")] if graphs else ["-"] * 3
        rows.append(
            [
                f"{size[0]}x{size[1]}",
                len(seconds),
                f"{eager_s:.3f}",
                f"{fast_s:.3f}",
                f"{eager_s / fast_s:.2f}x",
                *counts,
            ]
        )
    header = ["size", "pictures", "eager s/step", "compiled s/step", "speed-up"]
    return format_table([*header, "built", "loaded", "reused"], rows)


def _by_size(report: RunReport) -> dict[tuple[int, int], list[float]]:
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for picture in report.pictures:
        found[picture.width, picture.height].append(picture.seconds_per_step)
    return found


def _canvas(size: tuple[int, int]) -> tuple[int, int]:
    from onediff_ext.core.shapes import CELL_PX, MIN_SIDE_PX, round_up

    rows, columns = round_up(size[1], size[0])
    return max(MIN_SIDE_PX, columns * CELL_PX), max(MIN_SIDE_PX, rows * CELL_PX)
