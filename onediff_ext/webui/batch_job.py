"""Folders of images of many sizes through the WebUI's own img2img."""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onediff_ext.core.errors import PictureError
from onediff_ext.core.words import counted
from onediff_ext.pictures.batch.batch_drawer import (
    BatchDrawer,
    BatchToDraw,
    DrawnBatch,
    DrawnPicture,
    FurtherDrawer,
    WrittenPicture,
)
from onediff_ext.pictures.batch.batch_job import BatchJob
from onediff_ext.pictures.batch.grouping import LoadedPicture, PlannedPicture
from onediff_ext.pictures.batch.planning import check_found, plan_batch
from onediff_ext.pictures.batch.run_batches import batch_count, run_batches
from onediff_ext.pictures.skipped import SkipReport

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
# Of the processing object: what changes pictures, and the values with which it does not, or which
# the page always sends.
_RARELY_SET: dict[str, tuple[object, ...]] = {
    "eta": (None,),
    "s_churn": (None, 0),
    "s_tmin": (None, 0),
    "s_noise": (None, 1),
    "s_min_uncond": (None, 0),
    "initial_noise_multiplier": (None, 1),
    "image_cfg_scale": (None, 1.5),
    "tiling": (None, False),
    "restore_faces": (None, False),
    "refiner_checkpoint": (None, "", "None"),
    "refiner_switch_at": (None, 0.8),
    "seed_resize_from_w": (None, -1, 0),
    "seed_resize_from_h": (None, -1, 0),
}


@dataclass
class BatchResult:
    """The results of a run.

    Args:
        written: Results of this run.
        already_done: Results of an earlier run of the same job.
        report: Images that were left out, with the reasons.
        shown, infotexts: Content of the host's gallery.
        was_stopped: The user interrupted the run; the same job goes on there.
        skipped: Images of batches that the user skipped; the same job draws them.
        drawn_by: Images that other GPUs have drawn, by the GPU's name.
        lost: Why a GPU stopped drawing, by its name.
    """

    written: list[Path] = field(default_factory=list)
    already_done: list[Path] = field(default_factory=list)
    report: SkipReport = field(default_factory=SkipReport)
    shown: list[Any] = field(default_factory=list)
    infotexts: list[str] = field(default_factory=list)
    was_stopped: bool = False
    skipped: int = 0
    drawn_by: Counter[str] = field(default_factory=Counter)
    lost: dict[str, str] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether there is no result because every image was left out."""
        has_results = self.written or self.already_done or self.skipped or self.was_stopped
        return bool(self.report.failures) and not has_results

    def summary(self) -> str:
        """Return one line with the counts, and one for each GPU and image that was left out."""
        parts = [f"{counted(len(self.written), 'picture')} drawn"]
        parts += [f"{count} of them on {name}" for name, count in sorted(self.drawn_by.items())]
        if self.already_done:
            parts.append(f"{len(self.already_done)} were done already")
        if self.skipped:
            parts.append(f"{self.skipped} skipped")
        if self.was_stopped:
            parts.append("stopped; the same job goes on here")
        failures = self.report.failures
        if failures:
            parts.append(f"{len(failures)} left out")
        lost = [f"{name} stopped drawing: {why}." for name, why in sorted(self.lost.items())]
        return "\n".join([", ".join(parts) + ".", *lost, *map(str, failures)])


def run_batch_job(
    p: Any,
    job: BatchJob,
    *,
    process: Callable[[Any], Any],
    state: Any,
    identity: dict[str, object],
    shown_limit: int = 32,
    further: Callable[[HostDrawer], Sequence[FurtherDrawer[None]]] = lambda _: (),
) -> BatchResult:
    """Draw the missing results; images are read and written in threads while the host draws.

    Args:
        p: The host's img2img processing object, its seed already fixed.
        job: What to do.
        process: The host's ``process_images``.
        state: The host's ``shared.state``: progress, interrupt, skip.
        identity: What else decides an image, such as checkpoint and VAE.
        shown_limit: Images in the host's gallery, at most.
        further: Makes the drawers on other GPUs.

    Raises:
        OneDiffError: A setting cannot be used, or a result cannot be written. Written results
            stay, and the same job goes on there.
    """
    drawer = HostDrawer(p, job, process, state, shown_limit)
    result = drawer.result

    def settings_of(planned: PlannedPicture) -> dict[str, object]:
        return {**identity, **drawer.settings_of(planned)}

    plan = plan_batch(job, settings_of, result.report)
    check_found(plan, job.inputs, result.report)
    result.already_done = plan.already_done
    plan.make_folders()
    drawer.batch_count = batch_count(job, plan)
    state.job_count = max(1, drawer.batch_count)
    run_batches(job, plan, drawer, result.report, further(drawer))
    result.was_stopped = result.was_stopped or bool(state.interrupted)
    return result


class HostDrawer(BatchDrawer[None]):
    """Draws each batch as one img2img job of the host.

    Args:
        p: The host's img2img processing object.
        job: What to do.
        process: The host's ``process_images``.
        state: The host's ``shared.state``.
        shown_limit: Images in the host's gallery, at most.

    Attributes:
        batch_count: Of the run.
        result: So far.
        model: `model_of` the last batch that the host itself has drawn; None before the first.
    """

    def __init__(
        self,
        p: Any,
        job: BatchJob,
        process: Callable[[Any], Any],
        state: Any,
        shown_limit: int,
    ) -> None:
        self._p, self._job, self._process, self._state = p, job, process, state
        self._shown_limit = shown_limit
        self.batch_count = 0
        self.result = BatchResult()
        self.model: tuple[str, ...] | None = None

    def settings_of(self, planned: PlannedPicture) -> dict[str, object]:
        """Return the host's settings that a result depends on."""
        p = self._p
        return {
            "prompt": self._prompt_of(planned),
            "negative_prompt": p.negative_prompt,
            "steps": p.steps,
            "sampler": p.sampler_name,
            "scheduler": getattr(p, "scheduler", None),
            "cfg_scale": p.cfg_scale,
            "strength": p.denoising_strength,
            "styles": list(p.styles or ()),
            "override_settings": {k: str(v) for k, v in p.override_settings.items()},
            "subseed_strength": p.subseed_strength,
            **({"subseed": str(p.subseed)} if p.subseed_strength else {}),
            **_rare_settings(p),
        }

    def is_stopped(self) -> bool:
        stopped = bool(self._state.interrupted or self._state.stopping_generation)
        self.result.was_stopped = self.result.was_stopped or stopped
        return stopped

    def is_interrupted(self) -> bool:
        """Whether the user wants no batch to be finished."""
        return bool(self._state.interrupted)

    def draw(self, batch: BatchToDraw) -> Iterator[DrawnBatch[None]]:
        self._state.skipped = False
        width_px, height_px = batch.canvas_size_px
        self._state.job = (
            f"{batch.number} of {self.batch_count}: {counted(len(batch.pictures), 'picture')} of "
            f"{width_px}x{height_px}"
        )
        job = self.host_job(batch)
        processed = self._process(job)
        self.model = model_of(job)
        if self._state.skipped and not self._state.interrupted:
            self.result.skipped += len(batch.pictures)
        if self._state.interrupted or self._state.skipped or processed is None:
            return  # half-drawn images are not results
        first = getattr(processed, "index_of_first_image", 0)
        drawn = self.drawn_batch(batch, processed.images[first:], processed.infotexts[first:])
        if drawn.pictures:
            yield drawn

    def wait_for_model(self, is_wanted: Callable[[], bool]) -> bool:
        """Wait until the host has drawn a batch, so that `model` is known.

        Args:
            is_wanted: Whether there is still something to draw.

        Returns:
            False when nothing is left to draw.
        """
        while self.model is None:
            if not is_wanted():
                return False
            time.sleep(_LOOK_S)
        return True

    def drawn_batch(
        self, batch: BatchToDraw, images: Sequence[Any], infotexts: Sequence[str]
    ) -> DrawnBatch[None]:
        """Return what the host has drawn; images after those of the batch are left out."""
        found = zip(batch.pictures, images, infotexts, strict=False)
        return DrawnBatch([_drawn_picture(*each) for each in found], None)

    def count(self, name: str, pictures: int) -> None:
        """Take note of a batch that another GPU has drawn."""
        self.result.drawn_by[name] += pictures
        self._state.job_no += 1

    def lose(self, name: str, reason: str) -> None:
        """Take note that another GPU draws no more."""
        logger.warning("%s stopped drawing: %s", name, reason)
        self.result.lost[name] = reason

    def on_written(self, drawn: DrawnBatch[None], picture: WrittenPicture) -> None:  # noqa: ARG002
        self.result.written.append(picture.path)
        if len(self.result.shown) < self._shown_limit:
            self.result.shown.append(picture.image)
            self.result.infotexts.append(picture.infotext)

    def host_job(self, batch: BatchToDraw) -> Any:
        """Return the host's processing object of a batch."""
        p, planned = self._p, [loaded.planned for loaded in batch.pictures]
        job = copy.copy(p)
        job.init_images = batch.prepared
        job.width, job.height = batch.canvas_size_px
        job.batch_size, job.n_iter = len(planned), 1
        # One seed and one prompt for each image: the grouping must not change a result.
        job.seed = [self._job.seed_of(one) for one in planned]
        job.subseed = [-1 if p.subseed is None else p.subseed] * len(planned)
        job.prompt = [self._prompt_of(one) for one in planned]
        job.image_mask = None
        job.resize_mode = 0
        job.do_not_save_samples = job.do_not_save_grid = True
        job.override_settings = dict(p.override_settings)
        job.extra_generation_params = dict(p.extra_generation_params)
        return job

    def _prompt_of(self, planned: PlannedPicture) -> Any:
        return self._p.prompt if planned.caption is None else planned.caption


def model_of(p: Any) -> tuple[str, ...]:
    """Return what the host says of the model that has drawn a job."""
    names = ("sd_model_name", "sd_model_hash", "sd_vae_name", "sd_vae_hash")
    return tuple(str(getattr(p, name, None)) for name in names)


def _rare_settings(p: Any) -> dict[str, str]:
    """What a job sets that most leave alone, so that their results of earlier versions stay."""
    found = {name: getattr(p, name, None) for name in _RARELY_SET}
    return {name: str(value) for name, value in found.items() if value not in _RARELY_SET[name]}


def _drawn_picture(source: LoadedPicture, image: Any, infotext: str) -> DrawnPicture:
    fit = source.planned.fit
    if image.size != (fit.canvas_width_px, fit.canvas_height_px):
        reason = "another script has changed the result's size"
        return DrawnPicture(source, PictureError(f"Not written: {reason}."))
    return DrawnPicture(source, image.convert("RGB"), infotext)
