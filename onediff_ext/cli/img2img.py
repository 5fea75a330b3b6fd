"""``onediff-ext img2img FOLDER…``: folders of images through image to image."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.cli import report_file
from onediff_ext.cli.argument_types import picture_path, positive_amount
from onediff_ext.cli.cluster_arguments import add_cluster_arguments
from onediff_ext.cli.draw_arguments import DEFAULTS, add_draw_arguments, draw_settings
from onediff_ext.cli.model_arguments import add_model_arguments
from onediff_ext.cli.model_identity import model_identity
from onediff_ext.cli.model_loading import load_model
from onediff_ext.cli.progress import BuildProgressBars, Progress
from onediff_ext.core.garbage_collection import without_collection
from onediff_ext.core.start_up_times import process_started_at, seconds_since
from onediff_ext.core.words import counted, printable

if TYPE_CHECKING:
    from onediff_ext.cli.workers_ahead import WorkersAhead
    from onediff_ext.hosts.diffusers.jobs.img2img_job import Img2ImgJob
    from onediff_ext.hosts.diffusers.jobs.run_img2img import BatchDone
    from onediff_ext.hosts.diffusers.jobs.run_report import RunReport
    from onediff_ext.pictures.batch.planning import Plan
    from onediff_ext.pictures.skipped import SkipReport


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "img2img",
        help="run folders of pictures of any sizes through image to image",
        description="Pictures are grouped by size; the same seed gives the same picture however"
        " they are grouped. A run that was stopped goes on where it stopped.",
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        type=picture_path,
        metavar="FOLDER",
        help="or files, or URLs such as s3://bucket/folder",
    )
    add_arguments(parser)
    parser.set_defaults(run=run, when_stopped="The same command goes on where it stopped.")


def add_arguments(
    parser: argparse.ArgumentParser, *, defaults: Mapping[str, str] | None = None
) -> None:
    """Add all arguments but the inputs; the demo has them too.

    Args:
        parser: Of the command.
        defaults: What the help says of `--size`, steps, guidance and sampler where that differs.
    """
    defaults = defaults or {}
    parser.add_argument(
        "-o",
        "--output",
        type=picture_path,
        default=Path("onediff-output"),
        help="folder or URL of the results (default: %(default)s)",
    )
    parser.add_argument(
        "--size",
        default="own",
        help="own, scale:0.5, longest:768 or fixed:512x512 (default: "
        f"{defaults.get('size', 'own')})",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=4,
        help="pictures of one size at once, 1 to 31 (default: %(default)s)",
    )
    parser.add_argument(
        "--name", default="{stem}.png", help="name template of the results (default: %(default)s)"
    )
    parser.add_argument("--recursive", action="store_true", help="look into subfolders")
    parser.add_argument(
        "--captions", action="store_true", help="cat.txt beside cat.jpg is that picture's prompt"
    )
    parser.add_argument(
        "--vary-seed", action="store_true", help="add the picture's number to the seed"
    )
    parser.add_argument("--keep-alpha", action="store_true", help="keep the inputs' transparency")
    parser.add_argument(
        "--max-megapixels",
        type=positive_amount,
        default=4.2,
        help="larger results are left out (default: 4.2)",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what happened as JSON")
    add_draw_arguments(parser, with_strength=True, defaults={**DEFAULTS, **defaults})
    add_model_arguments(parser)
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the job; 1 when images failed."""
    from onediff_ext.cli.workers_ahead import workers_ahead

    with workers_ahead(arguments) as ahead:
        return _run(arguments, ahead)


def _run(arguments: argparse.Namespace, ahead: WorkersAhead | None) -> int:
    with without_collection():
        from onediff_ext.hosts.diffusers.jobs.img2img_job import plan_job
        from onediff_ext.hosts.diffusers.jobs.run_report import RunReport
        from onediff_ext.pictures.skipped import SkipReport

    identity = model_identity(arguments, imports_here=ahead is None)
    if ahead is not None:
        ahead.identity = identity
    job = make_job(arguments, identity)
    skipped, report = SkipReport(), RunReport()
    plan = plan_job(job, skipped)
    report.already_done = [str(path) for path in plan.already_done]
    plan.make_folders()
    report_file.check_report_path(arguments.report)
    if plan.already_done:
        print(f"{counted(len(plan.already_done), 'picture')} already done.")
    try:
        if plan.todo and ahead is not None:
            from onediff_ext.cli.cluster_run import run_img2img_on_workers

            run_img2img_on_workers(arguments, job, plan, report, skipped, ahead=ahead)
        elif plan.todo:
            _draw_here(arguments, job, plan, report, skipped)
    except BaseException:
        report.skipped = skipped.as_json()
        report_file.write_what_happened(arguments.report, report)
        report_file.print_left_out(report)
        raise
    report.skipped = skipped.as_json()
    if arguments.report is not None:
        report_file.write_report(arguments.report, report)
    if plan.todo:
        report_file.print_summary(report)
        drawn = f"{counted(len(report.pictures), 'picture')} drawn, in {job.batch.output_dir}"
        print(printable(drawn))
    else:
        report_file.print_left_out(report)
        if not plan.already_done and not skipped.failures:
            print(printable(_nothing_found(arguments)), file=sys.stderr)
    return 1 if skipped.failures else 0


def _draw_here(
    arguments: argparse.Namespace,
    job: Img2ImgJob,
    plan: Plan,
    report: RunReport,
    skipped: SkipReport,
) -> None:
    with without_collection():
        from onediff_ext.hosts.diffusers.jobs.run_img2img import run_img2img
        from onediff_ext.hosts.diffusers.jobs.run_report import describe_device

    model = load_model(
        arguments,
        job.identity,
        BuildProgressBars(),
        check=lambda image_generator: image_generator.check(job.settings, "img2img"),
    )
    report.device = describe_device(model.image_generator.device)
    report.ready_seconds = model.ready_seconds
    report.warnings = model.image_generator.ignored_text(job.settings)
    progress = Progress("pictures", len(plan.todo))

    def show(batch: BatchDone) -> None:
        note = f"{batch.width_px}x{batch.height_px}, {batch.drawn.seconds_per_step:.3f} s/step"
        progress.advance(len(batch.outputs), note)
        model.times.mark("first picture")

    end = model.close
    try:
        run_img2img(
            job,
            plan,
            model.image_generator,
            report,
            skipped,
            session=model.session,
            on_batch=show,
        )
        end = model.leave
    finally:
        progress.close()
        report.take_session(model.session, model.image_generator.device)
        report.start_up = seconds_since(process_started_at(), model.times.steps)
        end()


def _nothing_found(arguments: argparse.Namespace) -> str:
    folders = ", ".join(str(path) for path in arguments.inputs)
    deeper = "" if arguments.recursive else " --recursive looks into subfolders too."
    return f"There is no picture in {folders}.{deeper}"


def make_job(arguments: argparse.Namespace, identity: dict[str, object]) -> Img2ImgJob:
    """Return the job of the command line.

    Raises:
        OptionError: A value cannot be used.
    """
    from onediff_ext.core.errors import OptionError
    from onediff_ext.hosts.diffusers.jobs.img2img_job import Img2ImgJob
    from onediff_ext.hosts.diffusers.jobs.model_identity import earlier_identities
    from onediff_ext.pictures.batch.batch_job import BatchJob
    from onediff_ext.pictures.naming import NameTemplate
    from onediff_ext.pictures.size_rules import parse_size_rule

    if not 1 <= arguments.batch_size <= 31:
        raise OptionError("The batch size must be 1 to 31.", "Leave --batch-size out.")
    batch = BatchJob(
        inputs=arguments.inputs,
        output_dir=arguments.output,
        size_rule=parse_size_rule(arguments.size),
        seed=arguments.seed,
        vary_seed=arguments.vary_seed,
        batch_size=arguments.batch_size,
        name_template=NameTemplate(arguments.name),
        recursive=arguments.recursive,
        captions=arguments.captions,
        keep_alpha=arguments.keep_alpha,
        max_megapixels=arguments.max_megapixels,
    )
    return Img2ImgJob(batch, draw_settings(arguments), identity, earlier_identities(identity))
