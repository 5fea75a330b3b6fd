"""Result files: figures of a run are merged with those of earlier runs on the same machine."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROW_KEY = ("contender", "dtype", "width", "height")


class OtherMachineError(Exception):
    """Figures of two machines or two settings must not be in one file."""


def now() -> str:
    """Return the time in UTC to the minute, for rows and contenders."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ")


def read_result(path: Path) -> dict[str, Any] | None:
    """Return the figures of a file, or None if it does not exist."""
    if not path.exists():
        return None
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return figures


def write_result(path: Path, figures: dict[str, Any]) -> None:
    """Write figures as JSON, completely or not at all."""
    part = path.with_name(path.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def measure_and_write(
    arguments: argparse.Namespace, measure: Callable[[argparse.Namespace], dict[str, Any]]
) -> None:
    """Measure once, print the figures, and write them where a file is named.

    Args:
        arguments: With `store`, which is a folder for this run alone where it is None, and `json`.
        measure: Returns the figures.
    """
    with tempfile.TemporaryDirectory(prefix="onediff-bench-") as folder:
        arguments.store = arguments.store or Path(folder)
        figures = measure(arguments)
    if arguments.json is not None:
        write_result(arguments.json, figures)
    print(json.dumps(figures, indent=1))


def check_mergeable(
    old: dict[str, Any] | None, new: dict[str, Any], same: Sequence[str] = ("what", "model")
) -> None:
    """Check that figures may be merged with older ones; called before a measurement.

    Args:
        old: Figures of the file, or None.
        new: Has the machine's fingerprint and the entries of `same`.
        same: Names of settings that must be equal.

    Raises:
        OtherMachineError: The file has figures of another machine, other versions or other
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
            " Name another file, or replace this one with --replace."
        )


def merge(
    old: dict[str, Any] | None,
    new: dict[str, Any],
    *,
    key: Sequence[str] = ROW_KEY,
    same: Sequence[str] = ("what", "model"),
) -> dict[str, Any]:
    """Merge figures with older ones of the same machine.

    Rows with the same `key` are replaced in place, and other rows stay; contenders likewise. A
    measurement that was stopped ("stopped" in a row, "ended" of a contender) does not replace a
    figure. All other entries come from the new figures.

    Raises:
        OtherMachineError: See `check_mergeable`.
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
    """Return the fingerprint without its date."""
    return {k: v for k, v in figures.get("fingerprint", {}).items() if k != "date"}
