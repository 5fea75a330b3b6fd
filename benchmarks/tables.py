"""Write the README's tables from the result files: ``python -m benchmarks.tables``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: {} -->", "<!-- end -->"
NAMED_SIZES = ((512, 512), (720, 720), (960, 720), (1024, 1024), (1280, 1280), (136, 200))


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
    for name, make in (("any size", _any_size), ("one set of graphs", _one_set)):
        begin = BEGIN.format(name)
        if begin not in text:
            continue
        head, rest = text.split(begin, 1)
        _, tail = rest.split(END, 1)
        text = f"{head}{begin}\n{make()}\n{END}{tail}"
    return text


def _any_size() -> str:
    """Milliseconds of a UNet step at the named sizes, for each model measured on a GPU."""
    found = {name: _read(name) for name in ("sdxl", "sd1")}
    lines = [
        "| size | SDXL eager | SDXL compiled | SD1.5 eager | SD1.5 compiled |",
        "| --- | --- | --- | --- | --- |",
    ]
    for width, height in NAMED_SIZES:
        rows = [_row(figures, width, height) for figures in found.values()]
        if None in rows:
            continue  # beyond the largest side of one of the runs
        cells = [f"{row[k]:.1f}" for row in rows if row for k in ("eager_ms", "compiled_ms")]
        lines.append(f"| {width}x{height} | " + " | ".join(cells) + " |")
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
    path = RESULTS / f"any-size-{model}-h200.json"
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return figures


def _row(figures: dict[str, Any], width: int, height: int) -> dict[str, Any] | None:
    for row in figures["rows"]:
        if (row["width"], row["height"]) == (width, height):
            found: dict[str, Any] = row
            return found
    return None


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
