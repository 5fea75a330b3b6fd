"""``onediff-ext demo``: txt2img and img2img on sample photographs, eager and compiled."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.cli import img2img, library_imports, report_file
from onediff_ext.cli.argument_types import named_path
from onediff_ext.cli.model_identity import model_identity
from onediff_ext.cli.model_loading import load_image_generator, open_session, put_graphs_under
from onediff_ext.cli.progress import BuildProgressBars, Progress
from onediff_ext.cli.tables import format_table
from onediff_ext.core.demo_files import DEMO_PHOTOS
from onediff_ext.core.words import printable

if TYPE_CHECKING:
    from onediff_ext.hosts.diffusers.drawing.image_generator import ImageGenerator
    from onediff_ext.hosts.diffusers.jobs.img2img_job import Img2ImgJob
    from onediff_ext.hosts.diffusers.jobs.run_img2img import BatchDone
    from onediff_ext.hosts.diffusers.jobs.run_report import ReuseCounter, RunReport
    from onediff_ext.session.session import Session

# Prompts of txt2img for the demo checkpoint, with width and height in pixels.
PROMPTS = (
    ("a fox in the snow", 192, 192),
    ("a cat and a rocket on a yellow background", 256, 128),
    ("two apples", 128, 192),
    ("an octopus under the sea", 256, 192),
    ("a castle at sunset", 192, 128),
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "demo",
        help="run the main job on sample photographs, eager beside compiled",
        description="Draws each photograph eager and compiled, with the options of img2img.",
    )
    parser.add_argument(
        "inputs",
        nargs="*",
        type=named_path,
        metavar="FOLDER",
        help="your own pictures (default: the photographs that come with OneDiff)",
    )
    steps, guidance, scheduler = 16, 4.0, "DPM++ 2M Karras"
    img2img.add_arguments(
        parser,
        defaults={
            "size": "own on a GPU, scale:0.375 on a CPU",
            "steps": str(steps),
            "guidance": f"{guidance:g}",
            "scheduler": scheduler,
        },
    )
    parser.set_defaults(
        build="wait",
        run=run,
        output=Path("demo-output"),
        prompt="a cat on a yellow background",
        captions=True,
        steps=steps,
        strength=0.65,
        guidance=guidance,
        scheduler=scheduler,
        size=None,
        batch_size=2,
    )


def run(arguments: argparse.Namespace) -> int:
    """Draw everything eager, then compiled; print a table and the output folder."""
    from onediff_ext.core.errors import OptionError
    from onediff_ext.pictures.urls import is_url

    if is_url(arguments.output):
        raise OptionError("The demo writes to this machine.", "Name a folder of it with -o.")
    report_file.check_report_path(arguments.report)
    arguments.inputs = arguments.inputs or sorted(DEMO_PHOTOS.glob("*.jpg"))
    identity = model_identity(arguments)
    library_imports.import_libraries()
    image_generator = load_image_generator(arguments)
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
    print(printable(f"pictures: {job.batch.output_dir}; all of them together: {sheet}"))
    return 0


def _draw_prompts(job: Img2ImgJob, name: str, image_generator: ImageGenerator) -> list[Path]:
    """Draw `PROMPTS`; returns no paths for a checkpoint that needs an input image."""
    from onediff_ext.core.errors import OptionError
    from onediff_ext.hosts.diffusers.jobs.compose_infotext import compose_infotext
    from onediff_ext.pictures.writing import write_png

    paths: list[Path] = []
    for number, (prompt, width, height) in enumerate(PROMPTS):
        settings = dataclasses.replace(job.settings, prompt=prompt)
        try:
            image = image_generator.txt2img(settings, width, height, [job.batch.seed]).images[0]
        except OptionError:
            return []
        if image is not None:
            paths.append(job.batch.output_dir / name / f"txt2img-{number}.png")
            text = compose_infotext(image_generator, settings, job.batch.seed, image.size, {})
            write_png(paths[-1], image, infotext=text, digest="")
    return paths


def _contact_sheet(
    job: Img2ImgJob, drawn: list[tuple[str, list[Path]]], eager: RunReport, compiled: RunReport
) -> Path:
    """Write a sheet: images from text, then photographs above their results."""
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
    path = job.batch.output_dir / "contact-sheet.jpg"
    stack(sheets).save(path, quality=90)
    return path


def _compile(
    image_generator: ImageGenerator, arguments: argparse.Namespace, identity: dict[str, object]
) -> tuple[Session, float]:
    import time

    start = time.perf_counter()
    session = open_session(arguments, identity)
    put_graphs_under(image_generator, arguments, session, BuildProgressBars())
    return session, time.perf_counter() - start


def _run(
    job: Img2ImgJob, name: str, image_generator: ImageGenerator, session: Session | None
) -> tuple[RunReport, ReuseCounter]:
    from onediff_ext.hosts.diffusers.jobs.img2img_job import plan_job
    from onediff_ext.hosts.diffusers.jobs.run_img2img import run_img2img
    from onediff_ext.hosts.diffusers.jobs.run_report import RunReport, describe_device
    from onediff_ext.pictures.skipped import SkipReport

    # The demo shows times, so results of an earlier demo are not reused.
    identity = {**job.identity, "demo": id(job)}
    batch = dataclasses.replace(job.batch, output_dir=job.batch.output_dir / name)
    job = dataclasses.replace(job, batch=batch, identity=identity, earlier=())
    skipped, report = SkipReport(), RunReport(device=describe_device(image_generator.device))
    plan = plan_job(job, skipped)
    progress = Progress(f"{name} pictures", len(plan.todo))

    def show(batch: BatchDone) -> None:
        note = f"{batch.width_px}x{batch.height_px}, {batch.drawn.seconds_per_step:.3f} s/step"
        progress.advance(len(batch.outputs), note)

    try:
        reuse = run_img2img(
            job, plan, image_generator, report, skipped, session=session, on_batch=show
        )
    finally:
        progress.close()
    report.take_session(session, image_generator.device)
    report.skipped = skipped.as_json()
    return report, reuse


def _table(eager: RunReport, compiled: RunReport, reuse: ReuseCounter | None) -> str:
    """Return a table with one row for each size of the results."""
    from onediff_ext.pictures.canvas_sizes import canvas_size

    before, after = _by_size(eager), _by_size(compiled)
    rows = []
    for size, seconds in before.items():
        eager_s, fast_s = statistics.median(seconds), statistics.median(after[size])
        graphs = reuse.by_size.get(canvas_size(*size)) if reuse else None
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
