"""``onediff-ext warmup SIZES``: builds or loads all graphs, then measures a step of each size."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.cli import report_file
from onediff_ext.cli.argument_types import named_path, positive_count, required_sizes
from onediff_ext.cli.cluster_arguments import add_cluster_arguments
from onediff_ext.cli.draw_arguments import add_guidance_steps
from onediff_ext.cli.model_arguments import add_model_arguments
from onediff_ext.cli.model_identity import model_identity
from onediff_ext.cli.model_loading import load_model
from onediff_ext.cli.progress import Progress
from onediff_ext.cli.tables import format_table
from onediff_ext.core.start_up_times import process_started_at
from onediff_ext.core.words import counted

if TYPE_CHECKING:
    from onediff_ext.cli.workers_ahead import WorkersAhead
    from onediff_ext.core.shapes import BatchShape
    from onediff_ext.session.session import Session
    from onediff_ext.session.warm_up_report import WarmUpProgress, WarmUpReport

_TITLES = {"kinds": "building graphs", "captures": "capturing", "measuring": "measuring"}


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("warmup", help="build graphs now and measure a step of each size")
    parser.add_argument("sizes", nargs="*", help='such as 512x768 or "512x768, 1024x1024@2"')
    parser.add_argument(
        "--from",
        dest="from_folders",
        action="append",
        type=named_path,
        default=[],
        metavar="FOLDER",
        help="add the sizes of the latest pictures in a folder, most frequent first",
    )
    parser.add_argument(
        "--most",
        type=positive_count,
        default=8,
        help="at most so many sizes of --from (default: %(default)s)",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="then build graphs again with more effort, and keep the faster ones (on GPUs)",
    )
    add_guidance_steps(
        parser,
        "those of the pictures to come, such as gate:0.4: builds what they need too (default: off)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    add_model_arguments(parser)
    add_cluster_arguments(parser)
    parser.set_defaults(run=run, when_stopped="What was built is kept; the rest is built later.")


def run(arguments: argparse.Namespace) -> int:
    """Warm up; 1 when a block kind stays eager."""
    from onediff_ext.cli.workers_ahead import workers_ahead

    shapes = _shapes(arguments)
    with workers_ahead(arguments) as ahead:
        return _run(arguments, shapes, ahead)


def _run(
    arguments: argparse.Namespace, shapes: list[BatchShape], ahead: WorkersAhead | None
) -> int:
    report_file.check_report_path(arguments.json)
    identity = model_identity(arguments, imports_here=ahead is None)
    if ahead is not None:
        ahead.identity = identity
    if not arguments.no_build:
        arguments.build = "background"  # the warm-up itself waits
    if ahead is not None:
        return _run_in_workers(arguments, shapes, identity, ahead)
    model = load_model(arguments, identity, hold_builds=True)
    session = model.session
    assert session is not None

    from onediff_ext.hosts.diffusers.jobs.run_report import left_eager
    from onediff_ext.hosts.diffusers.warmup import pipe_warm_up

    progress = _StageProgress()
    try:
        pipe = model.image_generator.pipe
        steps = arguments.guidance_steps
        report = pipe_warm_up(pipe, shapes, progress, guidance_steps=steps).run()
        if arguments.tune:
            progress.close()
            if _tune(session):
                again = pipe_warm_up(pipe, shapes, progress, guidance_steps=steps)
                measured = again.run()  # and compares new graphs
                report.sizes = measured.sizes
    finally:
        progress.close()
        model.close()
    print(_table(report))
    print(
        f"{counted(report.built, 'graph')} built, {report.loaded} loaded"
        f" in {model.ready_seconds + report.seconds:.1f} s"
    )
    pays = session.status().pays_off_after
    if pays:
        print(f"The builds pay off after {counted(pays, 'picture')} of 20 steps.")
    if arguments.json is not None:
        report_file.write_json(arguments.json, {**report.as_json(), "pays_off_after": pays})
    eager = left_eager(session)
    report_file.print_fallbacks(eager)
    return 1 if eager else 0


def _tune(session: Session) -> int:
    """Tune all graphs; return how many are faster now, and say so."""
    kinds = session.current_kinds()
    if not any(session.backend.tuning(kind.device) for kind in kinds):
        print(f"Nothing is tuned: the backend {session.backend.name} cannot do it on this device.")
        return 0
    progress: Progress | None = None

    def listen(label: str, needed: int) -> None:
        nonlocal progress
        progress = progress or Progress("tuning graphs", needed)
        progress.advance(1, label)

    faster = session.tuning.tune_now(listen)
    if progress is not None:
        progress.close()
    gain = session.tuning.gain(kinds)
    print(f"{counted(faster, 'graph')} tuned" + (f", +{gain:.0%}" if gain else ""))
    return faster


def _run_in_workers(
    arguments: argparse.Namespace,
    shapes: list[BatchShape],
    identity: dict[str, object],
    ahead: WorkersAhead,
) -> int:
    """Warm up all workers; each kind of machine builds its graphs once."""
    from onediff_ext.cli.cluster_progress import worker_table
    from onediff_ext.cli.cluster_run import warm_up_workers, worker_row

    workers = warm_up_workers(arguments, shapes, identity, ahead)
    print(worker_table(workers))
    built = sum(worker.about.get("built", 0) for worker in workers)
    print(f"{counted(built, 'graph')} built on {counted(len(workers), 'worker')}")
    if arguments.json is not None:
        began_at = process_started_at()
        rows = [{**worker_row(w, began_at), "warm_up": w.about.get("warm_up")} for w in workers]
        report_file.write_json(arguments.json, {"workers": rows})
    eager = [entry for worker in workers for entry in worker.about.get("fallbacks", ())]
    report_file.print_fallbacks(eager)
    return 1 if eager else 0


def _shapes(arguments: argparse.Namespace) -> list[BatchShape]:
    from onediff_ext.core.errors import OptionError
    from onediff_ext.core.shapes import parse_sizes
    from onediff_ext.pictures.sizes_used import sizes_used

    shapes = parse_sizes(" ".join(arguments.sizes))
    if arguments.from_folders:
        shapes += sizes_used(arguments.from_folders, arguments.most)
        if not shapes:
            folders = ", ".join(str(path) for path in arguments.from_folders)
            raise OptionError(
                f"There is no picture in {folders}.",
                'Name another folder, or sizes such as "512x768, 720x960@2".',
            )
    return list(dict.fromkeys(shapes)) or required_sizes("")


def _table(report: WarmUpReport) -> str:
    return format_table(
        ["size", "at once", "first s", "eager ms", "compiled ms", "speed-up"],
        [
            [
                f"{f.shape.width_px}x{f.shape.height_px}",
                f.shape.batch,
                f"{f.first_s:.2f}",
                f"{f.eager_ms:.1f}",
                f"{f.compiled_ms:.1f}",
                f"{f.speedup:.2f}x",
            ]
            for f in report.sizes
        ],
    )


class _StageProgress:
    """Shows each stage of a warm-up with its own progress; stages with nothing to do are hidden."""

    def __init__(self) -> None:
        self._stage, self._done = "", 0
        self._progress: Progress | None = None

    def __call__(self, progress: WarmUpProgress) -> None:
        if progress.stage != self._stage:
            self.close()
            self._stage, self._done = progress.stage, 0
            if progress.done < progress.needed:
                self._progress = Progress(_TITLES[progress.stage], progress.needed)
        more = progress.done - self._done
        if self._progress is not None and more > 0:
            self._done = progress.done
            self._progress.advance(more, progress.label or "done", progress.seconds_left)

    def close(self) -> None:
        """End the display of the current stage."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None
