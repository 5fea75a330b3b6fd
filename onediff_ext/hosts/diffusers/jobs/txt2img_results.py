"""Writes the results of text to image."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onediff_ext.core.errors import PictureError
from onediff_ext.hosts.diffusers.jobs.compose_infotext import compose_infotext, lora_field
from onediff_ext.hosts.diffusers.jobs.run_report import PictureResult
from onediff_ext.pictures.naming import free_path
from onediff_ext.pictures.new_files import write_new_png

if TYPE_CHECKING:
    from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
    from onediff_ext.hosts.diffusers.drawing.image_generator import Drawn, ImageGenerator


def result_path(folder: Path, seed: int, width_px: int, height_px: int) -> Path:
    """Return a file for a picture that does not exist yet."""
    return free_path(folder / f"{seed:05d}-{width_px}x{height_px}.png")


def write_results(
    image_generator: ImageGenerator,
    settings: DrawSettings,
    identity: dict[str, object],
    drawn: Drawn,
    seeds: Sequence[int],
    paths: Sequence[Path],
) -> list[PictureResult | PictureError]:
    """Write the pictures of one batch.

    Args:
        image_generator: Drew them.
        settings: What was drawn.
        identity: Checkpoint and LoRAs, for the infotext.
        drawn: The batch.
        seeds, paths: Seed and file of each picture. A file that another run has written there
            meanwhile stays, and the picture gets the next name. One with the same infotext is the
            same picture, written by a worker that was lost afterwards.

    Returns:
        For each picture its result, or why there is none.

    Raises:
        PictureError: A file cannot be written.
    """
    results: list[PictureResult | PictureError] = []
    for index, (image, seed, path) in enumerate(zip(drawn.images, seeds, paths, strict=True)):
        if image is None:
            results.append(drawn.error(index))
            continue
        text = compose_infotext(image_generator, settings, seed, image.size, lora_field(identity))
        digest = hashlib.sha256(text.encode()).hexdigest()
        written = write_new_png(path, image, infotext=text, digest=digest)
        results.append(
            PictureResult(
                input="",
                output=str(written),
                width=image.width,
                height=image.height,
                seconds=drawn.seconds / len(seeds),
                seconds_per_step=drawn.seconds_per_step,
            )
        )
    return results
