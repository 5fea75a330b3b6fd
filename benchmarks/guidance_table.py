"""The table of guidance steps and DeepCache on the demo model."""

from __future__ import annotations

from typing import Any


def guidance_rows(figures: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Return header and lines: time, distance and recognised pictures of each setting.

    Args:
        figures: Of `benchmarks.guidance_demo`.
    """
    plain = figures["rows"][0]["cpu_s"]
    lines = [
        [
            row["guidance_steps"],
            row["deepcache"],
            f"{row['steps_with_guidance']} of {figures['steps']}",
            f"{row['cpu_s']:.1f}",
            f"{plain / row['cpu_s']:.1f}",
            *(_db(row.get(f"psnr_db_{which}")) for which in ("median", "min")),
            f"{row['recognised']} of {figures['concepts']}",
        ]
        for row in figures["rows"]
    ]
    header = ["guidance steps", "DeepCache", "steps with guidance", "CPU s", "times faster"]
    return [*header, "PSNR, dB", "worst picture, dB", "recognised"], lines


def _db(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
