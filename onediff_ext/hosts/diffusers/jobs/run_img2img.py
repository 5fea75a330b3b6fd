"""Runs an image-to-image job: batches of images through a diffusers pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.core.errors import PictureError
from onediff_ext.hosts.diffusers.drawing.image_generator import Drawn, ImageGenerator
from onediff_ext.hosts.diffusers.jobs.compose_infotext import compose_infotext, lora_field
from onediff_ext.hosts.diffusers.jobs.oom_halving import draw_in_halves
from onediff_ext.hosts.diffusers.jobs.run_report import PictureResult, ReuseCounter, RunReport
from onediff_ext.pictures.batch.batch_drawer import (
    BatchDrawer,
    BatchToDraw,
    DrawnBatch,
    DrawnPicture,
    WrittenPicture,
)
from onediff_ext.pictures.batch.run_batches import run_batches

if TYPE_CHECKING:
    from PIL import Image

    from onediff_ext.hosts.diffusers.jobs.img2img_job import Img2ImgJob
    from onediff_ext.pictures.batch.grouping import LoadedPicture
    from onediff_ext.pictures.batch.planning import Plan
    from onediff_ext.pictures.skipped import SkipReport
    from onediff_ext.session.session import Session


@dataclass(frozen=True)
class BatchDone:
    """One written batch, for progress displays."""

    width_px: int
    height_px: int
    drawn: Drawn
    outputs: list[Path]


def run_img2img(
    job: Img2ImgJob,
    plan: Plan,
    image_generator: ImageGenerator,
    report: RunReport,
    skipped: SkipReport,
    *,
    session: Session | None,
    on_batch: Callable[[BatchDone], None] = lambda _: None,
) -> ReuseCounter:
    """Draw the missing results, batch after batch; an image that fails leaves the others alone.

    Args:
        job: What to do.
        plan: From `plan_job`.
        image_generator: Draws.
        report: Gets results, notes and counts.
        skipped: Gets the images that are left out.
        session: Owns the graphs; None without graphs.
        on_batch: Called in the writing thread when a batch's results are in their files.

    Returns:
        Where the graphs of each size came from.

    Raises:
        PictureError: A result cannot be written (disk full); written results stay, and the same
            job goes on there.
    """
    drawer = PipelineDrawer(job, image_generator, report, skipped, ReuseCounter(session), on_batch)
    try:
        with image_generator.one_job():
            run_batches(job.batch, plan, drawer, skipped)
    finally:
        report.pictures = drawer.results_in_order()
    return drawer.reuse


class PipelineDrawer(BatchDrawer[Drawn]):
    """Draws batches with an `ImageGenerator` and fills the run's report.

    Args:
        job, image_generator, report, skipped, on_batch: As in `run_img2img`.
        reuse: Counts where the graphs of each size came from.
    """

    def __init__(
        self,
        job: Img2ImgJob,
        image_generator: ImageGenerator,
        report: RunReport,
        skipped: SkipReport,
        reuse: ReuseCounter,
        on_batch: Callable[[BatchDone], None],
    ) -> None:
        self._job, self._image_generator = job, image_generator
        self._report, self._skipped, self._on_batch = report, skipped, on_batch
        self._results: dict[int, PictureResult] = {}
        self.reuse = reuse

    def prepare(self, canvases: list[Image.Image]) -> Any:
        return self._image_generator.read(canvases)

    def draw(self, batch: BatchToDraw) -> Iterator[DrawnBatch[Drawn]]:
        had = self.reuse.before()

        def draw_part(part: slice) -> DrawnBatch[Drawn]:
            return self._draw_part(batch.pictures[part], batch.prepared[part])

        for part, drawn in draw_in_halves(draw_part, slice(0, len(batch.pictures))):
            if drawn is None:
                reason = PictureError(
                    "It does not fit into memory.", "Use a smaller size, such as longest:1024."
                )
                self._skipped.skip(batch.pictures[part.start].planned.header.path, reason)
                continue
            self._report.take_notes(drawn.host_result.notes)
            self._report.reused += self.reuse.after(*batch.canvas_size_px, had)
            yield drawn

    def on_written(self, drawn: DrawnBatch[Drawn], picture: WrittenPicture) -> None:
        self._results[picture.planned.index] = PictureResult(
            input=str(picture.planned.header.path),
            output=str(picture.path),
            width=picture.image.width,
            height=picture.image.height,
            seconds=drawn.host_result.seconds / len(drawn.pictures),
            seconds_per_step=drawn.host_result.seconds_per_step,
        )

    def on_batch_written(self, drawn: DrawnBatch[Drawn], paths: list[Path]) -> None:
        fit = drawn.pictures[0].source.planned.fit
        size_px = fit.canvas_width_px, fit.canvas_height_px
        self._on_batch(BatchDone(*size_px, drawn.host_result, paths))

    @property
    def results(self) -> dict[int, PictureResult]:
        """The written results, by the index of their inputs."""
        return self._results

    def results_in_order(self) -> list[PictureResult]:
        """Return the written results in the order of the inputs."""
        return [self._results[index] for index in sorted(self._results)]

    def _draw_part(self, pictures: tuple[LoadedPicture, ...], prepared: Any) -> DrawnBatch[Drawn]:
        job = self._job
        seeds = [job.batch.seed_of(loaded.planned) for loaded in pictures]
        prompts = [job.settings_of(loaded.planned).prompt for loaded in pictures]
        drawn = self._image_generator.img2img(job.settings, prepared, seeds, prompts)
        results = [
            DrawnPicture(loaded, drawn.error(index))
            if image is None
            else DrawnPicture(loaded, image, self._infotext(loaded))
            for index, (loaded, image) in enumerate(zip(pictures, drawn.images, strict=True))
        ]
        return DrawnBatch(results, drawn)

    def _infotext(self, loaded: LoadedPicture) -> str:
        job, planned = self._job, loaded.planned
        return compose_infotext(
            self._image_generator,
            job.settings_of(planned),
            job.batch.seed_of(planned),
            (planned.fit.target_width_px, planned.fit.target_height_px),
            {"Denoising strength": job.settings.strength, **lora_field(job.identity)},
        )
