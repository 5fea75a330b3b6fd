"""Runs a command's pictures in workers: on all GPUs of this machine, or of a Ray cluster."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.cli.cluster_programs import (
    Img2ImgProgram,
    Img2ImgTask,
    Txt2ImgProgram,
    Txt2ImgTask,
    UnitOutcome,
    WarmUpProgram,
)
from onediff_ext.cli.cluster_progress import ClusterProgress, draws_with
from onediff_ext.cli.workers_ahead import WorkersAhead
from onediff_ext.cluster.batch_queue import MOST_DEATHS, BatchQueue, Poisoned, Unit
from onediff_ext.cluster.coordinator import Coordinator, WorkerState, start_all
from onediff_ext.cluster.metrics import ClusterMetrics
from onediff_ext.cluster.program import Program
from onediff_ext.cluster.ray_pool import RayPool
from onediff_ext.core.errors import PictureError
from onediff_ext.core.start_up_times import StartUpTimes, process_started_at, seconds_since

if TYPE_CHECKING:
    from onediff_ext.core.shapes import BatchShape
    from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
    from onediff_ext.hosts.diffusers.jobs.img2img_job import Img2ImgJob
    from onediff_ext.hosts.diffusers.jobs.run_report import PictureResult, RunReport
    from onediff_ext.pictures.batch.planning import Plan, PlannedResult
    from onediff_ext.pictures.skipped import SkipReport

Watch = Callable[[RayPool, Coordinator], None]
"""Called in every round of a run; a benchmark kills workers in it."""


class PicturesOnWorkers:
    """Collects what the workers of one run report.

    Args:
        report: Gets results, warnings and workers.
        skipped: Gets the images that are left out.
        needed: Number of pictures.
        arguments: Of the command line; they say how progress is shown.
    """

    def __init__(
        self,
        report: RunReport,
        skipped: SkipReport,
        needed: int,
        arguments: argparse.Namespace,
    ) -> None:
        self.report, self.skipped = report, skipped
        self.progress = ClusterProgress(needed, as_json=arguments.progress_json)
        self.metrics: ClusterMetrics | None = None
        self.times = StartUpTimes()
        self._results: dict[int, PictureResult] = {}

    def finished(
        self, unit: Unit, answer: tuple[UnitOutcome, dict[str, Any]], worker: WorkerState
    ) -> None:
        """Take a unit's outcome."""
        outcome, about = answer
        worker.about |= about
        if not unit.writes:
            return
        self.times.mark("first picture")
        self._results.update(outcome.results)
        worker.pictures += len(outcome.results)
        known = {(entry.path, entry.reason) for entry in self.skipped.skipped}
        new = [entry for entry in outcome.skipped if (entry.path, entry.reason) not in known]
        self.skipped.extend(new)
        self.report.reused += outcome.reused
        for warning in outcome.warnings:
            if warning not in self.report.warnings:
                self.report.warnings.append(warning)
        self.progress.done += len(outcome.results)
        self.progress.new_paths += [result.output for _, result in outcome.results]
        self.progress.failed += len(new)
        self.progress.note = outcome.note or self.progress.note
        if self.metrics is not None:
            self.metrics.written(worker, len(outcome.results))
            self.metrics.failed(len(new))

    def poisoned(self, path: Path, reason: str) -> None:
        """Take note of a picture that is given up."""
        error = PictureError(
            f"It ended its worker {MOST_DEATHS} times while it was drawn alone ({reason}).",
            "Look at this picture, or leave it out.",
        )
        self.skipped.skip(path, error)
        self.progress.failed += 1
        if self.metrics is not None:
            self.metrics.failed(1)

    def end(self, workers: Sequence[WorkerState]) -> None:
        """Fill the report: results in order, and a row for each worker."""
        self.progress.show(workers, last=True)
        report = self.report
        report.pictures = [self._results[number] for number in sorted(self._results)]
        ready = [worker for worker in workers if worker.about]
        began_at = process_started_at()
        report.start_up = seconds_since(began_at, self.times.steps)
        report.workers = [worker_row(worker, began_at) for worker in workers]
        if ready:
            report.device = ", ".join(dict.fromkeys(str(w.about["device"]) for w in ready))
            report.ready_seconds = max(float(w.about["ready_seconds"]) for w in ready)
            report.peak_bytes = max(int(w.about["peak_bytes"]) for w in ready)
        for worker in ready:
            report.built += worker.about["built"]
            report.loaded += worker.about["loaded"]
            report.recompiles += worker.about["recompiles"]
            report.fallbacks += worker.about["fallbacks"]
            report.warnings += [w for w in worker.about["warnings"] if w not in report.warnings]


def worker_row(worker: WorkerState, began_at: float) -> dict[str, Any]:
    """Return a worker's row in the report.

    Args:
        worker: The worker.
        began_at: When the command began, in seconds since 1970: its start-up is counted from there.
    """
    about = worker.about
    return {
        "name": worker.name,
        "host": about.get("host", ""),
        "gpu": about.get("gpu", ""),
        "device": about.get("device", ""),
        "pictures": worker.pictures,
        "draws_with": draws_with(worker),
        "built": about.get("built", 0),
        "loaded": about.get("loaded", 0),
        "ready_seconds": about.get("ready_seconds", 0.0),
        "start_up": seconds_since(began_at, about.get("start_up", {})),
        "peak_bytes": about.get("peak_bytes", 0),
        "lost": worker.lost,
    }


def run_img2img_on_workers(
    arguments: argparse.Namespace,
    job: Img2ImgJob,
    plan: Plan,
    report: RunReport,
    skipped: SkipReport,
    watch: Watch | None = None,
    wrap: Callable[[Img2ImgProgram], Program] = lambda program: program,
    ahead: WorkersAhead | None = None,
) -> None:
    """Draw the missing results of a plan in workers; batches are those of one GPU.

    Args:
        arguments: Of the command line, its paths absolute.
        job, plan: What to do.
        report: Gets results, warnings and workers.
        skipped: Gets the images that are left out.
        watch: See `Watch`.
        wrap: Puts another program around what each worker does.
        ahead: The workers, started before; None starts them now. They have ended afterwards.

    Raises:
        OptionError: Ray is not installed.
        ClusterError: No worker can be used.
        PictureError: A result cannot be written; written ones stay, and the same job goes on there.
    """
    from onediff_ext.pictures.batch.grouping import group_by_canvas

    results = {result.planned.index: result for result in plan.todo}
    groups = group_by_canvas([result.planned for result in plan.todo])
    size = job.batch.batch_size
    queue = BatchQueue(
        [len(group.pictures) for group in groups],
        [size] * len(groups),
        [float(group.canvas_width_px * group.canvas_height_px) for group in groups],
    )
    first = [0]
    for number in range(len(groups)):
        first.append(first[-1] + queue.batches_in(number))

    def result_at(group: int, batch: int, position: int) -> PlannedResult:
        return results[groups[group].pictures[batch * size + position].index]

    def task_of(unit: Unit) -> Img2ImgTask:
        drawn = tuple(result_at(unit.group, unit.batch, p) for p in unit.positions)
        return Img2ImgTask(first[unit.group] + unit.batch + 1, drawn, unit.writes)

    def path_of(poisoned: Poisoned) -> Path:
        return result_at(poisoned.group, poisoned.batch, poisoned.position).planned.header.path

    folders = {result.path.parent for result in plan.todo}
    started = ahead or WorkersAhead(arguments, delay_s=0)
    run = secrets.token_hex(4)
    pictures = PicturesOnWorkers(report, skipped, len(plan.todo), arguments)
    program = wrap(Img2ImgProgram(arguments, job, run))
    _draw(started, queue, program, task_of, path_of, pictures, watch, folders, run)
    failed = {entry.path: entry for entry in skipped.skipped}
    order = {result.planned.header.path: index for index, result in results.items()}
    skipped.skipped[:] = sorted(failed.values(), key=lambda entry: order.get(entry.path, -1))


def run_txt2img_on_workers(
    arguments: argparse.Namespace,
    settings: DrawSettings,
    identity: dict[str, object],
    shapes: Sequence[BatchShape],
    report: RunReport,
    skipped: SkipReport,
    watch: Watch | None = None,
    ahead: WorkersAhead | None = None,
) -> None:
    """Draw from a prompt in workers; sizes, seeds and names are those of one GPU.

    Args:
        arguments: Of the command line, its paths absolute.
        settings, identity: What to draw, with which model.
        shapes: Each batch's size, in order.
        report, skipped, watch, ahead: As in `run_img2img_on_workers`.

    Raises:
        OneDiffError: As in `run_img2img_on_workers`.
    """
    from onediff_ext.hosts.diffusers.jobs.txt2img_results import result_path

    seeds_of: dict[BatchShape, list[tuple[int, int]]] = {}
    number = 0
    for shape in shapes:
        for _ in range(shape.batch):
            seeds_of.setdefault(shape, []).append((number, arguments.seed + number))
            number += 1
    groups = list(seeds_of)
    paths: dict[int, Path] = {}
    for shape, pairs in seeds_of.items():
        for at, seed in pairs:
            paths[at] = result_path(arguments.output, seed, shape.width_px, shape.height_px)
    queue = BatchQueue(
        [len(seeds_of[shape]) for shape in groups],
        [shape.batch for shape in groups],
        [float(shape.width_px * shape.height_px) for shape in groups],
    )

    def pair_at(group: int, batch: int, position: int) -> tuple[int, int]:
        return seeds_of[groups[group]][batch * groups[group].batch + position]

    def task_of(unit: Unit) -> Txt2ImgTask:
        pairs = [pair_at(unit.group, unit.batch, position) for position in unit.positions]
        return Txt2ImgTask(
            groups[unit.group],
            tuple(seed for _, seed in pairs),
            tuple(paths[at] for at, _ in pairs),
            tuple(at for at, _ in pairs),
            unit.writes,
        )

    def path_of(poisoned: Poisoned) -> Path:
        _, seed = pair_at(poisoned.group, poisoned.batch, poisoned.position)
        return Path(f"seed {seed}")

    started = ahead or WorkersAhead(arguments, delay_s=0)
    run = secrets.token_hex(4)
    pictures = PicturesOnWorkers(report, skipped, number, arguments)
    program = Txt2ImgProgram(arguments, settings, identity, run)
    _draw(started, queue, program, task_of, path_of, pictures, watch, {arguments.output}, run)


def warm_up_workers(
    arguments: argparse.Namespace,
    shapes: Sequence[BatchShape],
    identity: dict[str, object],
    ahead: WorkersAhead | None = None,
) -> list[WorkerState]:
    """Build or fetch all graphs on each worker, and measure a step of each size there.

    Args:
        arguments: Of the command line, its paths absolute.
        shapes: The sizes.
        identity: From `model_identity`.
        ahead: The workers, started before; None starts them now.

    Returns:
        The workers; `about["warm_up"]` is each one's report.

    Raises:
        OneDiffError: As in `run_img2img_on_workers`.
    """
    program = WarmUpProgram(arguments, shapes, identity)
    with ahead or WorkersAhead(arguments, delay_s=0) as started:
        return start_all(started.pool(program), started.limit)


def _draw(
    ahead: WorkersAhead,
    queue: BatchQueue,
    program: Program,
    task_of: Callable[[Unit], Any],
    path_of: Callable[[Poisoned], Path],
    pictures: PicturesOnWorkers,
    watch: Watch | None,
    folders: set[Path],
    run: str,
) -> None:
    from onediff_ext.pictures.writing import remove_unfinished

    workers: list[WorkerState] = []
    try:
        pool = ahead.pool(program)
        pictures.times.steps |= ahead.times.steps
        metrics = pictures.metrics = ClusterMetrics()

        def tick() -> None:
            pictures.progress.show(coordinator.workers)
            metrics.workers(coordinator.workers)
            if watch is not None:
                watch(pool, coordinator)

        coordinator = Coordinator(
            queue,
            pool,
            task_of,
            pictures.finished,
            lambda poisoned, reason: pictures.poisoned(path_of(poisoned), reason),
            on_tick=tick,
            worker_limit=ahead.limit,
        )
        workers = coordinator.workers
        coordinator.run()
    finally:
        ahead.close()
        # All workers have ended; what they left half-written is nobody's.
        for folder in folders:
            remove_unfinished(folder, run)
        pictures.end(workers)
