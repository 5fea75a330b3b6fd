"""The table of `benchmarks.neo_compile`: what a user of Neo waits for, with each contender."""

from __future__ import annotations

import statistics
from typing import Any

NAMES = {"host": "Neo by itself", "ours": "OneDiff"}
EVENTS = {
    "start": "first picture",
    "LoRA on": "first one with a LoRA",
    "LoRA off": "first one without it again",
    "new size": "first one of a new size",
    "restart": "first one after a restart",
    "new size after the restart": "a new size after it",
}


def neo_compile_table(figures: dict[str, Any]) -> str:
    """Seconds of first and later pictures, and milliseconds a step, by contender.

    Of a LoRA that was switched several times, the first picture is the median of these times. A
    picture that did not come in time has the reason in its place, and one that was not asked
    for a dash.
    """
    rows = {
        (row["contender"], row["event"], row["width"], row["height"]): row
        for row in figures["rows"]
    }
    # The host and OneDiff come first.
    drawn = [contender for contender, *_ in rows]
    contenders = [name for name in dict.fromkeys([*NAMES, *drawn]) if name in drawn]
    jobs = list(dict.fromkeys(key[1:] for key in rows))
    lines = [["", "size", *(NAMES.get(name, name) for name in contenders)]]
    lines.append(["---"] * len(lines[0]))
    for event, width, height in jobs:
        found = [rows.get((name, event, width, height)) for name in contenders]
        lines.append([f"{EVENTS[event]}, s", f"{width}x{height}", *map(_first, found)])
    for event, width, height in jobs:
        drawn = [rows.get((name, event, width, height), {}) for name in contenders]
        if any("ms_step" in row for row in drawn):
            steps = [f"{row['ms_step']:.1f}" if "ms_step" in row else "-" for row in drawn]
            lines.append(["a step, ms", f"{width}x{height}", *steps])
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in r) for r in lines)


def _first(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if "first_s" not in row:
        return str(row["stopped"])
    later = f", then {row['seconds']:.2f}" if "seconds" in row else ""
    # One figure for a LoRA that was switched several times; rows of one change have the first only.
    first_s = statistics.median(row.get("changes_s", [row["first_s"]]))
    return f"{first_s:.2f}{later}"
