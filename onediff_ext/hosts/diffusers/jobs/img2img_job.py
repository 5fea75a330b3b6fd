"""The main job: folders of pictures of many sizes through image to image."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.core.errors import PictureError
from onediff_ext.engine.out_of_memory import is_out_of_memory
from onediff_ext.hosts.diffusers.drawing.image_generator import Drawn, DrawSettings, ImageGenerator
from onediff_ext.hosts.diffusers.jobs.run_report import PictureResult, ReuseCounter, RunReport
from onediff_ext.hosts.diffusers.schedulers import infotext_names
from onediff_ext.pictures.background_io import Writing, read_ahead
from onediff_ext.pictures.fitting import from_canvas, to_target
from onediff_ext.pictures.grouping import (
    Group,
    LoadedPicture,
    PlannedPicture,
    group_by_canvas,
    read_batches,
)
from onediff_ext.pictures.infotext import build_infotext
from onediff_ext.pictures.naming import NameTemplate
from onediff_ext.pictures.planning import Plan, PlannedResult, plan_results
from onediff_ext.pictures.sizing import MAX_MEGAPIXELS, SizeRule
from onediff_ext.pictures.skipped import Report
from onediff_ext.pictures.writing import write_png

if TYPE_CHECKING:
    from PIL import Image

    from onediff_ext.session.session import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Img2ImgJob:
    """One run over folders of pictures.

    Args:
        inputs: Files and folders.
        output_dir: Where results go.
        settings: What to draw.
        identity: What else decides a picture: checkpoint and LoRAs by their content.
        seed: Every picture's seed.
        vary_seed: Add the picture's number to the seed.
        size_rule: How large each result becomes.
        batch_size: Pictures of one size at the same time, at most.
        name_template: How results are named.
        recursive: Look into subfolders too.
        captions: Take ``cat.txt`` beside ``cat.jpg`` as that picture's prompt.
        keep_alpha: Give a result the transparency of its input.
        max_megapixels: Larger results are refused.
    """

    inputs: Sequence[Path]
    output_dir: Path
    settings: DrawSettings
    identity: dict[str, object]
    seed: int
    size_rule: SizeRule
    vary_seed: bool = False
    batch_size: int = 4
    name_template: NameTemplate = field(default_factory=NameTemplate)
    recursive: bool = False
    captions: bool = False
    keep_alpha: bool = False
    max_megapixels: float = MAX_MEGAPIXELS

    def seed_of(self, planned: PlannedPicture) -> int:
        """The picture's seed; never depends on how pictures are grouped."""
        return self.seed + (planned.index if self.vary_seed else 0)

    def settings_of(self, planned: PlannedPicture) -> DrawSettings:
        """The settings with the picture's own prompt, if it has one."""
        if planned.caption is None:
            return self.settings
        return replace(self.settings, prompt=planned.caption)


@dataclass(frozen=True)
class BatchDone:
    """One batch, for progress displays."""

    width_px: int
    height_px: int
    drawn: Drawn
    outputs: list[Path]


def plan_job(job: Img2ImgJob, report: Report) -> Plan:
    """Find the pictures and settle sizes and names; loads no model and few pixels.

    Raises:
        OptionError: A setting cannot be used.
        PictureError: An input does not exist, or a result cannot be looked at.
    """
    job.settings.check_img2img_steps()
    return plan_results(
        job.inputs,
        job.output_dir,
        job.size_rule,
        job.name_template,
        seed_of=job.seed_of,
        settings_of=partial(_digest_settings, job),
        report=report,
        recursive=job.recursive,
        captions=job.captions,
        max_megapixels=job.max_megapixels,
    )


def run_job(
    job: Img2ImgJob,
    plan: Plan,
    image_generator: ImageGenerator,
    report: RunReport,
    skipped: Report,
    *,
    session: Session | None,
    on_batch: Callable[[BatchDone], None] = lambda _: None,
) -> ReuseCounter:
    """Draw what is left, batch after batch; a picture that fails leaves the others alone.

    Pictures are read and written in threads. `on_batch` is called in the one that writes, when a
    batch's pictures are in their files.

    Returns:
        For each size, how its kinds were had.

    Raises:
        PictureError: A result cannot be written (disk full); what was written stays, and the
            same job goes on there.
    """
    targets = {result.planned.index: result for result in plan.todo}
    reuse = ReuseCounter(session)
    results: dict[int, PictureResult] = {}

    def write(size: tuple[int, int], part: tuple[LoadedPicture, ...], drawn: Drawn) -> None:
        written = _write(job, image_generator, part, drawn, targets, results, skipped)
        on_batch(BatchDone(*size, drawn, written))

    try:
        with image_generator.one_job(), Writing() as writing:
            for group, batch, images in read_ahead(_batches(job, plan, image_generator, skipped)):
                size = (group.canvas_width_px, group.canvas_height_px)
                had = reuse.before()
                for part, drawn in _draw(job, image_generator, batch, images, skipped):
                    report.take_notes(drawn.notes)
                    report.reused += reuse.after(*size, had)
                    writing.put(partial(write, size, part, drawn))
    finally:
        report.pictures = [results[index] for index in sorted(results)]
    return reuse


def _batches(
    job: Img2ImgJob, plan: Plan, image_generator: ImageGenerator, skipped: Report
) -> Iterator[tuple[Group, tuple[LoadedPicture, ...], Any]]:
    """Each group's batches, and what the painter takes of them."""
    for group in group_by_canvas([result.planned for result in plan.todo]):
        for batch in read_batches(group, job.batch_size, report=skipped):
            yield group, batch, image_generator.read([loaded.canvas for loaded in batch])


def _draw(
    job: Img2ImgJob,
    image_generator: ImageGenerator,
    batch: tuple[LoadedPicture, ...],
    images: Any,
    skipped: Report,
) -> Iterator[tuple[tuple[LoadedPicture, ...], Drawn]]:
    """Draw a batch, in halves when it does not fit into memory."""
    import torch

    seeds = [job.seed_of(loaded.planned) for loaded in batch]
    try:
        prompts = [job.settings_of(loaded.planned).prompt for loaded in batch]
        drawn = image_generator.img2img(job.settings, images, seeds, prompts)
    except (RuntimeError, MemoryError) as exc:
        if not is_out_of_memory(exc):
            raise
        drawn = None
    if drawn is not None:
        yield batch, drawn
        return
    torch.cuda.empty_cache()
    if len(batch) == 1:
        reason = PictureError(
            "It does not fit into memory.", "Use a smaller size, such as longest:1024."
        )
        skipped.skip(batch[0].planned.facts.path, reason)
        return
    logger.info("A batch of %d does not fit into memory: halved", len(batch))
    half = len(batch) // 2
    yield from _draw(job, image_generator, batch[:half], images[:half], skipped)
    yield from _draw(job, image_generator, batch[half:], images[half:], skipped)


def _write(
    job: Img2ImgJob,
    image_generator: ImageGenerator,
    batch: tuple[LoadedPicture, ...],
    drawn: Drawn,
    targets: dict[int, PlannedResult],
    results: dict[int, PictureResult],
    skipped: Report,
) -> list[Path]:
    written = []
    for index, (loaded, image) in enumerate(zip(batch, drawn.images, strict=True)):
        planned = loaded.planned
        if image is None:
            skipped.skip(planned.facts.path, drawn.error(index))
            continue
        result, target = from_canvas(image, planned.fit), targets[planned.index]
        alpha = loaded.picture.alpha if job.keep_alpha else None
        write_png(
            target.path,
            result,
            infotext=_infotext(job, image_generator, planned, result),
            digest=target.digest,
            alpha=None if alpha is None else to_target(alpha, planned.fit),
        )
        results[planned.index] = PictureResult(
            input=str(planned.facts.path),
            output=str(target.path),
            width=result.width,
            height=result.height,
            seconds=drawn.seconds / len(batch),
            seconds_per_step=drawn.seconds_per_step,
        )
        written.append(target.path)
    return written


def _digest_settings(job: Img2ImgJob, planned: PlannedPicture) -> dict[str, object]:
    """What a result depends on besides its input; grouping and batch size are no part of it."""
    settings = dict(vars(job.settings_of(planned)))
    deepcache = settings.pop("deepcache")
    return {
        **settings,
        **({"deepcache": str(deepcache)} if deepcache.is_on else {}),
        **job.identity,
        "seed": job.seed_of(planned),
        "size_rule": str(job.size_rule),
        "keep_alpha": job.keep_alpha,
    }


def _infotext(
    job: Img2ImgJob, image_generator: ImageGenerator, planned: PlannedPicture, result: Image.Image
) -> str:
    return infotext(
        image_generator,
        job.settings_of(planned),
        job.seed_of(planned),
        result,
        {"Denoising strength": job.settings.strength, **lora_field(job.identity)},
    )


def infotext(
    image_generator: ImageGenerator,
    settings: DrawSettings,
    seed: int,
    result: Image.Image,
    extra: dict[str, object],
) -> str:
    """The WebUI's `parameters` text of one result."""
    from onediff_ext import __version__

    sampler, schedule = infotext_names(settings.scheduler)
    with_deepcache = (
        settings.deepcache.is_on and image_generator.deepcache_refusal(settings) is None
    )
    fields: dict[str, object] = {
        "Steps": settings.steps,
        "Sampler": sampler,
        "Schedule type": schedule,
        "CFG scale": settings.guidance,
        "Seed": seed,
        "Size": f"{result.width}x{result.height}",
        "Model": image_generator.checkpoint.name,
        "OneDiff DeepCache": settings.deepcache.label if with_deepcache else None,
        **extra,
        "Version": f"onediff-ext {__version__}",
    }
    return build_infotext(settings.prompt, settings.negative_prompt, fields)


def lora_field(identity: dict[str, object]) -> dict[str, object]:
    """The LoRAs of a run as a field of infotext, if there are any."""
    loras = identity.get("loras")
    return {"Lora": ", ".join(map(str, loras))} if isinstance(loras, list) and loras else {}
