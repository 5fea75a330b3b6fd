"""Plot milliseconds against pixels for the README: ``python -m benchmarks.plot [--check]``.

Reads ``benchmarks/results/{unet,dit}-*.json`` and writes one SVG for light and one for dark pages
for each model, into ``docs/images``. ``--check`` only reports whether they are up to date.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.plain_rows import as_used
from benchmarks.results import read_result

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"


@dataclass(frozen=True)
class Subject:
    """What a plot shows.

    Args:
        title: The model's name.
        of: One of what is timed.
        conditions: How it is called.
        dtype: The rows that are drawn.
    """

    title: str
    conditions: str
    of: str = "forward"
    dtype: str = "bfloat16"


_PAIR = "CFG (two pictures)"
# By the name of the result file before the GPU's.
SUBJECTS = {
    "unet-sdxl": Subject("SDXL", _PAIR, "UNet step", "float16"),
    "unet-sd1": Subject("SD1.5", _PAIR, "UNet step", "float16"),
    "dit-flux": Subject("Flux.1-dev", "512 tokens of text"),
    "dit-sd35-medium": Subject("Stable Diffusion 3.5 medium", _PAIR),
    "dit-sd35-large": Subject("Stable Diffusion 3.5 large", _PAIR),
    "dit-z-image": Subject("Z-Image", "128 tokens of text"),
    "dit-qwen-image": Subject("Qwen-Image", "128 tokens of text"),
}


@dataclass(frozen=True)
class Style:
    """The line style of a contender.

    Args:
        title: Its name in the legend.
        light, dark: Colour on a light and on a dark page.
        marker: "circle", "square", "triangle", "diamond" or "cross".
        width_px: Width of its line.
        dash: SVG's stroke-dasharray; "" for a solid line.
    """

    title: str
    light: str
    dark: str
    marker: str
    width_px: float = 1.6
    dash: str = ""


EACH_SIZE = "2 3"  # dash of contenders that compile for each size

STYLES = {
    "eager": Style("eager", "#57606a", "#9ea7b3", "circle", 2.0),
    "compile_repeated_blocks as shown": Style("repeated blocks", "#0e7490", "#39c5cf", "diamond"),
    "compile_repeated_blocks": Style("repeated blocks, dynamic", "#9a6700", "#d9a520", "square"),
    "compile_repeated_blocks captured": Style(
        "repeated blocks, captured", "#1a7f37", "#4ac26b", "triangle"
    ),
    "torch.compile dynamic": Style("torch.compile, dynamic", "#bf3989", "#f778ba", "diamond"),
    "torch.compile": Style(
        "torch.compile, default", "#8250df", "#b794f6", "square", dash=EACH_SIZE
    ),
    "torch.compile reduce-overhead": Style(
        "torch.compile, captured", "#1a7f37", "#4ac26b", "triangle", dash=EACH_SIZE
    ),
    "torch.compile max-autotune": Style(
        "torch.compile, max-autotune", "#bc4c00", "#f0883e", "cross", dash=EACH_SIZE
    ),
    "stable-fast": Style("stable-fast", "#0e7490", "#39c5cf", "diamond", dash=EACH_SIZE),
    "torch-tensorrt": Style("torch-tensorrt", "#6e7781", "#8b949e", "cross", dash=EACH_SIZE),
    "ours-captured-eager": Style(
        "OneDiff, no graphs yet", "#218bff", "#79c0ff", "circle", 1.6, "6 4"
    ),
    "ours-exact": Style("OneDiff", "#0550ae", "#58a6ff", "circle", 3.2),
    "ours-fp8": Style("OneDiff, fp8", "#a40e26", "#ff7b72", "circle", 3.2),
}
"""Contender → style, in the legend's order; other contenders are not drawn."""

PAGES = {
    "light": {"text": "#1f2328", "soft": "#59636e", "grid": "#d1d9e0", "page": "#ffffff"},
    "dark": {"text": "#f0f6fc", "soft": "#9198a1", "grid": "#2f3742", "page": "#0d1117"},
}
WIDTH, HEIGHT = 890, 440
LEFT, RIGHT, TOP, BOTTOM = 58, 626, 62, 384
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"

Point = tuple[float, float]


def main(check: bool = False) -> int:
    """Write the plots; with `check`, only report whether they are up to date."""
    stale = []
    for path, text in pictures():
        if check:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(path.name)
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"out of date, run python -m benchmarks.plot: {', '.join(stale)}")
    return 1 if stale else 0


def pictures() -> Iterator[tuple[Path, str]]:
    """Return path → SVG of each plot; models without results have none."""
    for name, subject in SUBJECTS.items():
        figures = read_result(RESULTS / f"{name}-h200.json")
        if figures is None:
            continue
        for page in PAGES:
            yield IMAGES / f"{name}-{page}.svg", draw(figures, subject, page)


def draw(figures: dict[str, Any], subject: Subject, page: str) -> str:
    """Return one plot as SVG.

    Args:
        figures: Of a result file.
        subject: What it shows.
        page: "light" or "dark".
    """
    series = series_of(figures["rows"], subject.dtype)
    colours = PAGES[page]
    smallest_x = min(x for points in series.values() for x, _ in points)
    largest_x = max(x for points in series.values() for x, _ in points)
    largest_y = max(y for points in series.values() for _, y in points)
    step = next(s for s in (5, 10, 20, 50, 100, 200, 500, 1000) if largest_y / s <= 8)
    top = step * math.ceil(largest_y / step)

    first, last = 0.6 * smallest_x, largest_x + 0.4 * smallest_x

    def x_of(pixels: float) -> float:
        return LEFT + (RIGHT - LEFT) * (pixels - first) / (last - first)

    def y_of(ms: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * ms / top

    gpu = figures["fingerprint"].get("gpu", "CPU").removeprefix("NVIDIA ")
    versions = figures["fingerprint"]["versions"]
    described = f"{subject.title}: milliseconds of a {subject.of} against pixels"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
        f' viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{FONT}" font-size="12">',
        f"<title>{escape(described)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{colours["page"]}"/>',
        _text(
            20, 26, f"{subject.title}, one {subject.of}", colours["text"], size=17, weight=600
        ),
        _text(
            20, 45,
            f"milliseconds, median; {subject.conditions}, {subject.dtype}, {gpu},"
            f" torch {versions.get('torch', '')}; lower is better",
            colours["soft"],
        ),
    ]  # fmt: skip
    for ms in range(0, top + 1, step):
        y = y_of(ms)
        lines.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}"'
            f' stroke="{colours["grid"]}" stroke-width="1"/>'
        )
        lines.append(_text(LEFT - 8, y + 4, str(ms), colours["soft"], anchor="end"))
    for side in (512, 640, 720, 832, 1024, 1152, 1280, 1536, 2048):
        if first <= side * side <= last:
            x = x_of(side * side)
            lines.append(
                f'<line x1="{x:.1f}" y1="{BOTTOM}" x2="{x:.1f}" y2="{BOTTOM + 5}"'
                f' stroke="{colours["soft"]}" stroke-width="1"/>'
            )
            lines.append(_text(x, BOTTOM + 19, f"{side}²", colours["soft"], anchor="middle"))
    lines.append(
        _text((LEFT + RIGHT) / 2, BOTTOM + 40, "pixels of the picture", colours["soft"],
              anchor="middle")
    )  # fmt: skip
    # Draw thin lines last, on top of thick lines at the same place.
    for name in sorted(series, key=lambda name: -STYLES[name].width_px):
        colour = getattr(STYLES[name], page)
        places = [(x_of(x), y_of(y)) for x, y in series[name]]
        lines += _series(STYLES[name], colour, places, colours["page"])
    lines += _legend(series, page)
    return "\n".join([*lines, "</svg>"]) + "\n"


def series_of(rows: list[dict[str, Any]], dtype: str) -> dict[str, list[Point]]:
    """Return contender → [(pixels, ms)] by pixels; sizes of equal pixels become one point.

    Plain calls take the place of announced ones.
    """
    found: dict[str, dict[int, list[float]]] = {}
    measured = [row for row in rows if row["dtype"] == dtype and "ms_median" in row]
    for row in as_used(measured):
        if row["contender"] in STYLES:
            of_size = found.setdefault(row["contender"], {})
            of_size.setdefault(row["width"] * row["height"], []).append(row["ms_median"])
    return {
        name: [(float(pixels), statistics.fmean(ms)) for pixels, ms in sorted(found[name].items())]
        for name in STYLES
        if name in found
    }


def _series(style: Style, colour: str, places: list[Point], page: str) -> Iterator[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = f' stroke-dasharray="{style.dash}"' if style.dash else ""
    yield (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-linejoin="round"'
        f' stroke-width="{style.width_px}"{dash}/>'
    )
    for x, y in places:
        yield _marker(style, colour, x, y, page)


def _marker(style: Style, colour: str, x: float, y: float, page: str) -> str:
    r = 4.2 if style.width_px > 2.5 else 3.4
    # A rim in the page's colour separates markers that touch.
    fill = f'fill="{colour}" stroke="{page}" stroke-width="1"'
    if style.marker == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" {fill}/>'
    if style.marker == "square":
        return f'<rect x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r}" height="{2 * r}" {fill}/>'
    if style.marker == "cross":
        d = f"M{x - r:.1f},{y - r:.1f}l{2 * r},{2 * r}m0,-{2 * r}l-{2 * r},{2 * r}"
        return f'<path d="{d}" fill="none" stroke="{colour}" stroke-width="2"/>'
    if style.marker == "triangle":
        corners = [(x, y - 1.3 * r), (x + 1.2 * r, y + 0.9 * r), (x - 1.2 * r, y + 0.9 * r)]
    else:
        corners = [(x, y - 1.4 * r), (x + 1.4 * r, y), (x, y + 1.4 * r), (x - 1.4 * r, y)]
    return f'<polygon points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in corners)}" {fill}/>'


def _legend(series: dict[str, list[Point]], page: str) -> Iterator[str]:
    colours, x, y = PAGES[page], float(RIGHT + 26), float(TOP + 12)
    for name in series:
        style = STYLES[name]
        yield from _series(style, getattr(style, page), [(x, y), (x + 30, y)], "")
        ours = name.startswith("ours-")
        yield _text(x + 40, y + 4, style.title, colours["text"], weight=600 if ours else 400)
        y += 23
    if any(STYLES[name].dash == EACH_SIZE for name in series):
        yield _text(
            x - 4, y + 10, "Dotted: compiled again for each size,", colours["soft"], size=11
        )
        yield _text(x - 4, y + 25, "measured at some of them.", colours["soft"], size=11)


def _text(
    x: float, y: float, text: str, fill: str, *, size: int = 12, weight: int = 400,
    anchor: str = "start",
) -> str:  # fmt: skip
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="{size}" font-weight="{weight}"'
        f' text-anchor="{anchor}">{escape(text)}</text>'
    )


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
