"""Whether a WebUI's first picture waits for the graphs of the last start."""

from __future__ import annotations

from typing import Any


def job_shapes(job: Any) -> list[tuple[int, int, int]]:
    """(width, height, batch) of a job's passes, in pixels; hires-fix has a second pass."""
    width, height = int(job.width), int(job.height)
    batch = int(getattr(job, "batch_size", 1) or 1)
    shapes = [(width, height, batch)]
    if getattr(job, "enable_hr", False):
        scale = float(getattr(job, "hr_scale", 1) or 1)
        second = (
            int(getattr(job, "hr_resize_x", 0) or 0) or round(width * scale),
            int(getattr(job, "hr_resize_y", 0) or 0) or round(height * scale),
            batch,
        )
        shapes.append(second)
    return shapes


def work_of(job: Any) -> float:
    """How much a job draws, in steps of a megapixel. Passes of hires-fix count as whole ones.

    Args:
        job: The host's processing object ``p``.
    """
    pixels = sum(width * height * batch for width, height, batch in job_shapes(job))
    strength = 1.0
    if getattr(job, "init_images", None):
        strength = min(1.0, float(getattr(job, "denoising_strength", None) or 1))
    count = max(1, int(getattr(job, "n_iter", 1) or 1))
    return count * int(getattr(job, "steps", 1) or 1) * strength * pixels / 1e6
