"""What a measuring process has written down by the time it ended, or was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.results import now


def gather(
    stream: Path, end: str, names: list[str], dtype: str, suffix: str = ""
) -> dict[str, Any]:
    """Rows and contenders of a process from what it wrote, one JSON object a line.

    Each line is ``{"begun": size}``, ``{"row": row}`` or ``{"contenders": {name: figures}}``.
    A contender that had begun with a size and not finished it gets a row that says why.

    Args:
        stream: Its file.
        end: Why it ended too early, or "".
        names: Of its contenders.
        dtype: As rows name it.
        suffix: Of the names under "contenders".
    """
    rows: list[dict[str, Any]] = []
    contenders: dict[str, Any] = {}
    unfinished: dict[str, Any] | None = None
    text = stream.read_text(encoding="utf-8") if stream.exists() else ""
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # it was stopped while writing
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
