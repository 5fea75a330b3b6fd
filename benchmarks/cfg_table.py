"""Table of one picture on one GPU and on two."""

from __future__ import annotations

from typing import Any

SIZES = ("1024x1024", "1536x1024", "2048x2048")


def cfg_parallel(figures: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Seconds of a picture and milliseconds of a forward, on one GPU and on two.

    Args:
        figures: Result files of `benchmarks.cfg_parallel`.

    Returns:
        Header and lines.
    """
    header = ["size", "steps", "one GPU: picture, s", "two, s", "times faster"]
    header += ["one GPU: forward, ms", "two, ms", "times faster", "PSNR, dB"]
    lines = []
    for found in figures:
        one, two = found["one"], found["two"]
        lines.append([
            f"{found['width']}x{found['height']}", found["steps"],
            f"{one['picture_s']:.2f}", f"{two['picture_s']:.2f}", f"{found['times_faster']:.2f}",
            f"{one['forward_ms']:.1f}", f"{two['forward_ms']:.1f}",
            f"{found['times_faster_forward']:.2f}", f"{found['psnr_db']:.0f}",
        ])  # fmt: skip
    return header, lines
