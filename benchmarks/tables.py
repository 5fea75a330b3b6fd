"""Write the README's tables from the result files: ``python -m benchmarks.tables``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: {} -->", "<!-- end -->"
SIZES = ((512, 512), (720, 720), (896, 768), (960, 720), (1024, 1024), (1280, 1280), (2048, 512))
UNET_COLUMNS = {
    "eager": "eager",
    "ours-captured-eager": "eager, captured",
    "compile_repeated_blocks": "repeated blocks",
    "ours-exact": "OneDiff",
}


def main(check: bool = False) -> int:
    """Rewrite the README, or with `check` only say whether it is up to date."""
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = with_tables(before)
    if check:
        return 0 if after == before else 1
    readme.write_text(after, encoding="utf-8")
    return 0


def with_tables(text: str) -> str:
    """The text with each marked section made anew."""
    sections = {
        "unet sdxl": lambda: _unet("sdxl"),
        "unet sd1": lambda: _unet("sd1"),
        "vae": _vae,
        "deepcache": _deepcache,
        "one set of graphs": _one_set,
    }
    for name, make in sections.items():
        begin = BEGIN.format(name)
        if begin not in text:
            continue
        head, rest = text.split(begin, 1)
        _, tail = rest.split(END, 1)
        text = f"{head}{begin}\n{make()}\n{END}{tail}"
    return text


def _unet(model: str) -> str:
    """Milliseconds of a UNet step, a column for each contender, and eager's share."""
    figures = _result(f"unet-{model}")
    columns = {
        name: title
        for name, title in UNET_COLUMNS.items()
        if any(row["contender"] == name for row in figures["rows"])
    }
    lines = [
        "| size | " + " | ".join(columns.values()) + " | times faster |",
        "| --- " * (len(columns) + 2) + "|",
    ]
    for width, height in SIZES:
        ms = {
            row["contender"]: row["ms_median"]
            for row in figures["rows"]
            if (row["width"], row["height"]) == (width, height)
        }
        cells = [f"{ms[name]:.1f}" for name in columns]
        gain = ms["eager"] / ms["ours-exact"]
        lines.append(f"| {width}x{height} | " + " | ".join(cells) + f" | {gain:.1f} |")
    return "\n".join(lines)


def _vae() -> str:
    """Milliseconds of a VAE decode."""
    rows = _result("vae-sdxl")["rows"]
    lines = ["| size | eager | OneDiff | times faster |", "| --- | --- | --- | --- |"]
    for eager, ours in zip(rows[::2], rows[1::2], strict=True):
        size, before, after = (
            f"{eager['width']}x{eager['height']}",
            eager["ms_median"],
            ours["ms_median"],
        )
        lines.append(f"| {size} | {before:.1f} | {after:.1f} | {before / after:.1f} |")
    return "\n".join(lines)


def _deepcache() -> str:
    """Seconds of a picture of 50 steps, with and without DeepCache."""
    lines = [
        "| interval | SDXL 1024x1024, s | times faster | SD1.5 512x512, s | times faster |",
        "| --- | --- | --- | --- | --- |",
    ]
    found = [_result("deepcache-sdxl")["rows"], _result("deepcache-sd15")["rows"]]
    for rows in zip(*found, strict=True):
        cells = [f"{row['picture_s']:.2f} | {row['speedup']:.1f}" for row in rows]
        lines.append(f"| {rows[0]['setting']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _one_set() -> str:
    """What the graphs cost, and that no size costs anything more."""
    lines = [
        "| | SDXL | SD1.5 |",
        "| --- | --- | --- |",
    ]
    found = [_read("sdxl"), _read("sd1")]
    rows: list[tuple[str, Any]] = [
        ("graphs", lambda r: r["kinds"]),
        ("empty store: all built, s", lambda r: f"{r['ready_s']:.1f}"),
        ("new process: all loaded, s", lambda r: f"{r['second_process']['ready_s']:.1f}"),
        ("sizes drawn afterwards", lambda r: len(r["rows"])),
        ("recompiles for them", lambda r: r["recompiles"]),
        ("slowest first step at a new size, s", _slowest_first_step),
        ("largest difference to eager", lambda r: f"{r['largest_error']:.1e}"),
    ]
    for label, cell in rows:
        lines.append(f"| {label} | " + " | ".join(str(cell(r)) for r in found) + " |")
    return "\n".join(lines)


def _slowest_first_step(figures: dict[str, Any]) -> str:
    return f"{max(row['first_s'] for row in figures['rows']):.2f}"


def _read(model: str) -> dict[str, Any]:
    return _result(f"any-size-{model}")


def _result(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}-h200.json"
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return figures


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
