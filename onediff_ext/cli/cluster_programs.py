"""What a worker on a GPU of its own does: image to image, text to image, and warm-up."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.cli.worker_model import load_shared_model
from onediff_ext.cluster.program import OpenProgram, Program
from onediff_ext.store import GraphExchange

if TYPE_CHECKING:
    from onediff_ext.core.shapes import BatchShape
    from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
    from onediff_ext.hosts.diffusers.drawing.image_generator import Drawn
    from onediff_ext.hosts.diffusers.jobs.img2img_job import Img2ImgJob
    from onediff_ext.hosts.diffusers.jobs.run_report import PictureResult
    from onediff_ext.pictures.batch.planning import PlannedResult
    from onediff_ext.pictures.skipped import Skipped


@dataclass
class UnitOutcome:
    """What the driver gets of a unit.

    Args:
        results: Each written picture with its place in the run.
        skipped: Images that were left out.
        warnings: What the user should know.
        reused: Block kinds that drew a new size with a graph of an earlier one.
        note: Size and speed, for the progress.
    """

    results: list[tuple[int, PictureResult]] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    reused: int = 0
    note: str = ""


@dataclass(frozen=True)
class Img2ImgTask:
    """Pictures of one batch.

    Args:
        number: Of the batch, from 1.
        results: What is drawn.
        writes: False for a probe.
    """

    number: int
    results: tuple[PlannedResult, ...]
    writes: bool


@dataclass(frozen=True)
class Txt2ImgTask:
    """Pictures of one size.

    Args:
        shape: Their size.
        seeds, paths, numbers: Seed, file and place in the run of each.
        writes: False for a probe.
    """

    shape: BatchShape
    seeds: tuple[int, ...]
    paths: tuple[Path, ...]
    numbers: tuple[int, ...]
    writes: bool


@dataclass(frozen=True)
class Img2ImgProgram(Program):
    """Image to image.

    Args:
        arguments: Of the command line, its paths absolute.
        job: What to do.
        run: 8 hexadecimal digits, for the names of partial files.
    """

    arguments: argparse.Namespace
    job: Img2ImgJob
    run: str

    def open(self, name: str, exchange: GraphExchange | None, prepared: Any = None) -> OpenProgram:
        return _OpenImg2Img(self, name, exchange, prepared)


@dataclass(frozen=True)
class Txt2ImgProgram(Program):
    """Text to image; arguments as for `Img2ImgProgram`."""

    arguments: argparse.Namespace
    settings: DrawSettings
    identity: dict[str, object]
    run: str

    def open(self, name: str, exchange: GraphExchange | None, prepared: Any = None) -> OpenProgram:
        return _OpenTxt2Img(self, name, exchange, prepared)


@dataclass(frozen=True)
class WarmUpProgram(Program):
    """Builds or fetches all graphs and measures a step of each size, before the first unit.

    Args:
        arguments: Of the command line, its paths absolute.
        shapes: The sizes.
        identity: From `model_identity`.
    """

    arguments: argparse.Namespace
    shapes: Sequence[BatchShape]
    identity: dict[str, object]

    def open(self, name: str, exchange: GraphExchange | None, prepared: Any = None) -> OpenProgram:
        return _WarmedUp(self, name, exchange, prepared)


class _OpenModel(OpenProgram):
    """A checkpoint on this worker's device, with the graphs of all machines."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        identity: dict[str, object],
        name: str,
        exchange: GraphExchange | None,
        prepared: Any,
        *,
        hold_builds: bool = False,
    ) -> None:
        self._model, self._shared = load_shared_model(
            arguments, identity, name, exchange, prepared, hold_builds=hold_builds
        )

    def about(self) -> dict[str, Any]:
        from onediff_ext.hosts.diffusers.jobs.run_report import (
            describe_device,
            left_eager,
            peak_bytes,
            recompile_count,
        )

        device, session = self._model.image_generator.device, self._model.session
        about: dict[str, Any] = {
            "device": describe_device(device),
            "ready_seconds": self._model.ready_seconds,
            "start_up": self._model.times.steps,
            "peak_bytes": peak_bytes(device),
            "recompiles": recompile_count(),
            "built": 0,
            "loaded": 0,
            "kinds": 0,
            "fallbacks": [],
            "warnings": [],
        }
        if session is not None:
            about |= {
                "built": session.count("built"),
                "loaded": session.count("loaded"),
                "kinds": len(session.kinds),
                "built_kinds": [k.key.digest for k in session.kinds if k.source == "built"],
                "fallbacks": left_eager(session),
                "warnings": list(session.build_context.outcomes.warnings),
            }
        return about

    def close(self) -> None:
        self._model.close()
        if self._shared is not None:
            self._shared.close()


class _OpenImg2Img(_OpenModel):
    def __init__(
        self, program: Img2ImgProgram, name: str, exchange: GraphExchange | None, prepared: Any
    ) -> None:
        from onediff_ext.hosts.diffusers.jobs.run_report import ReuseCounter
        from onediff_ext.pictures.writing import unfinished_names

        unfinished_names.run = program.run
        self._job = program.job
        super().__init__(program.arguments, program.job.identity, name, exchange, prepared)
        self._model.image_generator.check(program.job.settings)
        self._reuse = ReuseCounter(self._model.session)
        self._kept = ExitStack()
        self._kept.enter_context(self._model.image_generator.one_job())

    def read(self, task: Img2ImgTask) -> Any:
        from onediff_ext.hosts.diffusers.jobs.run_img2img import PipelineDrawer
        from onediff_ext.hosts.diffusers.jobs.run_report import RunReport
        from onediff_ext.pictures.batch.batch_drawer import BatchToDraw
        from onediff_ext.pictures.batch.grouping import load_pictures
        from onediff_ext.pictures.batch.resume import is_done
        from onediff_ext.pictures.skipped import SkipReport

        report, skipped = RunReport(), SkipReport()
        # A worker that was lost may have written some of them before.
        missing = {r.planned.index: r for r in task.results if not is_done(r.path, r.digest)}
        drawer = PipelineDrawer(
            self._job, self._model.image_generator, report, skipped, self._reuse, lambda _: None
        )
        batch = None
        if missing or not task.writes:
            # All of them, since a picture's last bits depend on its batch.
            pictures = load_pictures([r.planned for r in task.results], report=skipped)
            if pictures:
                prepared = drawer.prepare([loaded.canvas for loaded in pictures])
                batch = BatchToDraw(task.number, pictures, prepared)
        return task, missing, drawer, batch, report, skipped

    def draw(self, read: Any) -> Any:
        drawer, batch = read[2], read[3]
        return read, [] if batch is None else list(drawer.draw(batch))

    def write(self, drawn: Any) -> UnitOutcome:
        from onediff_ext.hosts.diffusers.jobs.run_report import PictureResult
        from onediff_ext.pictures.batch.run_batches import write_batch

        (task, missing, drawer, batch, report, skipped), parts = drawn
        if not task.writes:
            return UnitOutcome()
        for part in parts:
            write_batch(self._job.batch, missing, drawer, part, skipped)
        results = dict(drawer.results)
        for result in task.results:
            planned = result.planned
            if planned.index not in missing:
                fit = planned.fit
                results[planned.index] = PictureResult(
                    input=str(planned.header.path),
                    output=str(result.path),
                    width=fit.target_width_px,
                    height=fit.target_height_px,
                    seconds=0.0,
                    seconds_per_step=0.0,
                )
        note = ""
        if batch is not None and parts:
            width_px, height_px = batch.canvas_size_px
            note = f"{width_px}x{height_px}, {parts[0].host_result.seconds_per_step:.3f} s/step"
        return UnitOutcome(
            sorted(results.items()), skipped.skipped, report.warnings, report.reused, note
        )

    def close(self) -> None:
        self._kept.close()
        super().close()


class _OpenTxt2Img(_OpenModel):
    def __init__(
        self, program: Txt2ImgProgram, name: str, exchange: GraphExchange | None, prepared: Any
    ) -> None:
        from onediff_ext.hosts.diffusers.jobs.run_report import ReuseCounter
        from onediff_ext.pictures.writing import unfinished_names

        unfinished_names.run = program.run
        self._settings, self._identity = program.settings, program.identity
        super().__init__(program.arguments, program.identity, name, exchange, prepared)
        self._model.image_generator.check_txt2img()
        self._model.image_generator.check(program.settings)
        self._reuse = ReuseCounter(self._model.session)
        self._kept = ExitStack()
        self._kept.enter_context(self._model.image_generator.one_job())

    def read(self, task: Txt2ImgTask) -> Txt2ImgTask:
        return task

    def draw(self, read: Txt2ImgTask) -> tuple[Txt2ImgTask, Drawn, int]:
        had = self._reuse.before()
        width_px, height_px = read.shape.width_px, read.shape.height_px
        drawn = self._model.image_generator.txt2img(self._settings, width_px, height_px, read.seeds)
        return read, drawn, self._reuse.after(width_px, height_px, had)

    def write(self, drawn: tuple[Txt2ImgTask, Drawn, int]) -> UnitOutcome:
        from onediff_ext.hosts.diffusers.jobs.txt2img_results import write_results
        from onediff_ext.pictures.skipped import Skipped

        task, pictures, reused = drawn
        if not task.writes:
            return UnitOutcome()
        written = write_results(
            self._model.image_generator, self._settings, self._identity, pictures,
            task.seeds, task.paths,
        )  # fmt: skip
        outcome = UnitOutcome(
            reused=reused,
            warnings=[str(note) for note in pictures.notes],
            note=f"{task.shape.width_px}x{task.shape.height_px},"
            f" {pictures.seconds_per_step:.3f} s/step",
        )
        for number, seed, result in zip(task.numbers, task.seeds, written, strict=True):
            if isinstance(result, Exception):
                outcome.skipped.append(Skipped(Path(f"seed {seed}"), str(result), is_failure=True))
            else:
                outcome.results.append((number, result))
        return outcome

    def close(self) -> None:
        self._kept.close()
        super().close()


class _WarmedUp(_OpenModel):
    def __init__(
        self, program: WarmUpProgram, name: str, exchange: GraphExchange | None, prepared: Any
    ) -> None:
        from onediff_ext.hosts.diffusers.warmup import pipe_warm_up

        super().__init__(
            program.arguments, program.identity, name, exchange, prepared, hold_builds=True
        )
        pipe, steps = self._model.image_generator.pipe, program.arguments.guidance_steps
        self._report = pipe_warm_up(pipe, program.shapes, guidance_steps=steps).run()
        if self._shared is not None:
            self._shared.push()

    def read(self, task: Any) -> Any:
        return task

    def draw(self, read: Any) -> Any:
        return read

    def write(self, drawn: Any) -> Any:
        return drawn

    def about(self) -> dict[str, Any]:
        return {**super().about(), "warm_up": self._report.as_json()}
