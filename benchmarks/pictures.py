"""Create the input pictures of `benchmarks.pipeline`; time and compare its outputs."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any


def make_inputs(folder: Path, sizes: list[tuple[int, int]], pictures: int) -> None:
    """Crop the package's photographs to each size; sorting by name sorts by size."""
    for number, size in enumerate(sizes):
        for count in range(pictures):
            picture = photograph(number * pictures + count, size)
            name = f"{number:02}-{size[0]}x{size[1]}-{count}.jpg"
            picture.save(folder / name, quality=95)


def photograph(number: int, size: tuple[int, int]) -> Any:
    """Return one of the package's photographs, in turn, cropped to a size."""
    from PIL import Image, ImageOps

    import onediff_ext

    photos = sorted((Path(onediff_ext.__file__).parent / "assets" / "photos").glob("*.jpg"))
    photo = Image.open(photos[number % len(photos)]).convert("RGB")
    return ImageOps.fit(photo, size, Image.Resampling.LANCZOS)


def picture_times(output: Path, started: float) -> list[tuple[str, float]]:
    """Return (name, seconds from the start until the file was written), in order of writing."""
    times = [(path.stem, path.stat().st_mtime - started) for path in output.glob("*.png")]
    return sorted(times, key=lambda item: (item[1], item[0]))


def size_rows(times: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """Return a row for each size: milliseconds from one picture's file to the next one's.

    The first picture is not counted, because it includes the start-up.
    """
    gaps: dict[str, list[float]] = {}
    before = None
    for name, seconds in times:
        size = name.split("-")[1]
        gaps.setdefault(size, [])
        if before is not None:
            gaps[size].append(1e3 * (seconds - before))
        before = seconds
    rows = []
    for size, found in gaps.items():
        if found:
            width, height = (int(side) for side in size.split("x"))
            rows.append({
                "width": width, "height": height, "pictures": len(found),
                "ms_median": statistics.median(found), "ms_mean": statistics.fmean(found),
                "ms_first": found[0],
            })  # fmt: skip
    return rows


def start_up_s(times: list[tuple[str, float]], rows: list[dict[str, Any]]) -> float:
    """Return the seconds of the first picture beyond those of later pictures of its size."""
    width, height = times[0][0].split("-")[1].split("x")
    usual = [r["ms_median"] for r in rows if (r["width"], r["height"]) == (int(width), int(height))]
    return times[0][1] - (usual[0] / 1e3 if usual else 0.0)


def compare_pictures(expected: Path, found: Path) -> dict[str, Any]:
    """Compare the pictures of two folders.

    Returns:
        Figures of the worst picture: psnr_db_min; mean_levels_max (of 256); contrast_levels_min,
        the least standard deviation of an expected picture, which must not be blank.
    """
    import numpy
    from PIL import Image

    psnr, levels, contrast = [], [], []
    paths = sorted(expected.glob("*.png"))
    for path in paths:
        theirs, ours = (
            numpy.asarray(Image.open(p).convert("RGB"), dtype=numpy.float64)
            for p in (path, found / path.name)
        )
        psnr.append(psnr_db(theirs, ours))
        levels.append(float(abs(theirs - ours).mean()))
        contrast.append(float(theirs.std()))
    return {
        "pictures": len(paths),
        "psnr_db_min": min(psnr),
        "psnr_db_median": statistics.median(psnr),
        "mean_levels_max": max(levels),
        "contrast_levels_min": min(contrast),
    }


def psnr_db(one: Any, other: Any) -> float:
    """Return the PSNR of two pictures, float64 arrays from 0 to 255; 99 for equal pictures."""
    square = float(((one - other) ** 2).mean())
    return 99.0 if square == 0 else 10 * math.log10(255**2 / square)
