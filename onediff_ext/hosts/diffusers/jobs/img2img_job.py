"""Image to image over folders of images with diffusers: what to do, and the plan for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
from onediff_ext.pictures.batch.batch_job import BatchJob
from onediff_ext.pictures.batch.planning import Plan, plan_batch

if TYPE_CHECKING:
    from onediff_ext.pictures.batch.grouping import PlannedPicture
    from onediff_ext.pictures.skipped import SkipReport


@dataclass(frozen=True)
class Img2ImgJob:
    """One run over folders of images.

    Args:
        batch: Inputs, sizes, names and seeds.
        settings: What to draw.
        identity: What else decides an image: checkpoint and LoRAs by their content.
        earlier: The same identity as earlier versions named it; their results count as done.
    """

    batch: BatchJob
    settings: DrawSettings
    identity: dict[str, object]
    earlier: tuple[dict[str, object], ...] = ()

    def settings_of(self, planned: PlannedPicture) -> DrawSettings:
        """Return the settings, with the image's caption as the prompt if it has one."""
        if planned.caption is None:
            return self.settings
        return replace(self.settings, prompt=planned.caption)


def plan_job(job: Img2ImgJob, report: SkipReport) -> Plan:
    """Find the images and settle sizes and names; loads no model.

    Args:
        job: What to do.
        report: Gets the images that are left out.

    Raises:
        OptionError: A setting cannot be used.
        PictureError: An input does not exist, or an existing result cannot be read.
    """
    job.settings.check_img2img_steps()
    settings_of = partial(_digest_settings, job, job.identity)
    earlier = [partial(_digest_settings, job, identity) for identity in job.earlier]
    return plan_batch(job.batch, settings_of, report, earlier=earlier)


def _digest_settings(
    job: Img2ImgJob, identity: dict[str, object], planned: PlannedPicture
) -> dict[str, object]:
    """Return the settings that a result depends on; what leaves work out counts where it is on."""
    settings = dict(vars(job.settings_of(planned)))
    speed_ups = {name: settings.pop(name) for name in ("deepcache", "step_cache", "guidance_steps")}
    used = {name: str(options) for name, options in speed_ups.items() if options.is_on}
    return {**settings, **used, **identity}
