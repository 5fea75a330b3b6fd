"""Table of a WebUI's folder on one GPU and on several."""

from __future__ import annotations

from typing import Any


def webui_gpus(figures: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Seconds of a folder by the number of GPUs, and how its pictures differ from one GPU's.

    Args:
        figures: A result file of `benchmarks.webui_gpus`.

    Returns:
        Header and lines.
    """
    first, *others = figures["rows"]
    lines: list[list[Any]] = [[first["gpus"], f"{first['seconds']:.1f}", "1.00", "-", "-"]]
    for row in others:
        lines.append([
            row["gpus"], f"{row['seconds']:.1f}", f"{row['times_faster']:.2f}",
            f"{row['equal']} of {figures['pictures']}", row["largest_difference"],
        ])  # fmt: skip
    header = ["GPUs", "folder, s", "times faster", "equal pictures", "largest difference, of 255"]
    return header, lines
