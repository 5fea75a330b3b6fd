"""Read the figures that a measuring process wrote before it ended or was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.results import now


def gather(
    stream: Path, end: str, names: list[str], dtype: str, suffix: str = ""
) -> dict[str, Any]:
    """Return rows and contenders of a process from its file, one JSON object for each line.

    Each line is ``{"begun": size}``, ``{"row": row}`` or ``{"contenders": {name: figures}}``.
    A contender that began a size without finishing it gets a row with the reason.

    Args:
        stream: The process's file.
        end: Why the process ended too early, or "".
        names: Names of its contenders.
        dtype: The dtype in rows.
        suffix: Suffix of names under "contenders".
    """
    rows: list[dict[str, Any]] = []
    contenders: dict[str, Any] = {}
    unfinished: dict[str, Any] | None = None
    text = stream.read_text(encoding="utf-8") if stream.exists() else ""
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the process was stopped while writing
        if "begun" in entry:
            unfinished = entry["begun"]
        elif "row" in entry:
            rows.append({**entry["row"], "measured": now()})
        else:
            contenders.update(entry["contenders"])
    if end:
        print(f"{', '.join(names)}, {unfinished or 'before the first size'}: {end}", flush=True)
        for name in names:
            contenders.setdefault(f"{name}{suffix}", {"ended": end, "measured": now()})
        done = {(row["contender"], row["width"], row["height"]) for row in rows}
        for name in names:
            if unfinished is None:
                break
            if (name, unfinished["width"], unfinished["height"]) not in done:
                rows.append({
                    "contender": name, "dtype": dtype, **unfinished, "stopped": end,
                    "measured": now(),
                })  # fmt: skip
    return {"rows": rows, "contenders": contenders}
