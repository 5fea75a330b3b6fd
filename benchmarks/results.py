"""Result files: what a run has measured is added to what earlier runs on the same machine have."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROW_KEY = ("contender", "dtype", "width", "height")


class OtherMachineError(Exception):
    """Figures of two machines, or of two settings, must not meet in one file."""


def now() -> str:
    """This minute in UTC, as rows and contenders carry it."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ")


def read_result(path: Path) -> dict[str, Any] | None:
    """The figures of a file, or None where there is none."""
    if not path.exists():
        return None
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return figures


def write_result(path: Path, figures: dict[str, Any]) -> None:
    """Write figures as JSON, whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def check_mergeable(
    old: dict[str, Any] | None, new: dict[str, Any], same: Sequence[str] = ("what", "model")
) -> None:
    """Say whether figures may be added to older ones; asked before anything is measured.

    Args:
        old: Of the file, or None.
        new: With the machine's fingerprint and whatever `same` names.
        same: Settings that decide a figure.

    Raises:
        OtherMachineError: The file's figures are of another machine, other versions or other
            settings.
    """
    if old is None:
        return
    before, after = _machine(old), _machine(new)
    names = [name for name in sorted(before | after) if before.get(name) != after.get(name)]
    names += [name for name in same if old.get(name) != new.get(name)]
    if names:
        raise OtherMachineError(
            f"The file's figures are not comparable, they differ in: {', '.join(names)}."
            " Name another file, or start this one anew with --replace."
        )


def merge(
    old: dict[str, Any] | None,
    new: dict[str, Any],
    *,
    key: Sequence[str] = ROW_KEY,
    same: Sequence[str] = ("what", "model"),
) -> dict[str, Any]:
    """Add figures to older ones of the same machine.

    Rows with the same `key` are replaced where they stand, others are kept; contenders likewise.
    What was stopped before it had a figure ("stopped" in a row, "ended" of a contender) takes no
    measured one away. Everything else is as the new figures have it.

    Raises:
        OtherMachineError: As `check_mergeable`.
    """
    check_mergeable(old, new, same)
    if old is None:
        return new
    merged = {**old, **new}
    rows = {_key_of(row, key): row for row in old.get("rows", ())}
    for row in new.get("rows", ()):
        place = _key_of(row, key)
        if "stopped" not in row or "ms_median" not in rows.get(place, {}):
            rows[place] = row
    merged["rows"] = list(rows.values())
    if "contenders" in old or "contenders" in new:
        contenders = dict(old.get("contenders", {}))
        for name, found in new.get("contenders", {}).items():
            contenders[name] = {**contenders.get(name, {}), **found} if "ended" in found else found
        merged["contenders"] = contenders
    return merged


def _key_of(row: dict[str, Any], key: Sequence[str]) -> tuple[Any, ...]:
    return tuple(tuple(v) if isinstance(v := row.get(name), list) else v for name in key)


def _machine(figures: dict[str, Any]) -> dict[str, Any]:
    """The fingerprint without its date."""
    return {k: v for k, v in figures.get("fingerprint", {}).items() if k != "date"}
