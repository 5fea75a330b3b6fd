"""Rows of plain calls: they lead in tables, and stand beside the UNet alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Contender of plain calls → the same with announced pictures.
PLAIN = {"plain": "ours-exact", "plain-fp8": "ours-fp8"}
ANNOUNCED = " announced"
# Up to this share they count as equal.
EQUAL = 0.02


def as_used(
    rows: Sequence[dict[str, Any]], key: Sequence[str] = ("dtype", "width", "height")
) -> list[dict[str, Any]]:
    """Return rows with those of plain calls in place of announced ones.

    Args:
        rows: Of a result file, with a contender and ``ms_median``.
        key: What rows of one measurement have in common.

    Returns:
        The rows. Where plain calls differ by more than `EQUAL`, the announced rows of this
        contender stay, with `ANNOUNCED` behind their contender's name. Without plain rows nothing
        changes.
    """
    found = list(rows)
    for plain, announced in PLAIN.items():
        ours, theirs = (_by_place(found, name, key) for name in (plain, announced))
        if not ours:
            continue
        differ = any(
            abs(ms / theirs[place] - 1) > EQUAL for place, ms in ours.items() if place in theirs
        )
        names = {plain: announced, announced: announced + ANNOUNCED if differ else ""}
        renamed = [
            {**row, "contender": names.get(row["contender"], row["contender"])} for row in found
        ]
        found = [row for row in renamed if row["contender"]]
    return found


def beside_unet(
    plain: dict[str, Any], loop: dict[str, Any], unet: dict[str, Any]
) -> tuple[list[str], list[list[str]]]:
    """Compare steps of a user's script with what they are made of, by size.

    Args:
        plain, loop: Result files of `benchmarks.plain`: of the script, and of the contender loop.
        unet: A result file of `benchmarks.unet`, of the same machine.

    Returns:
        The table's header and lines: milliseconds, and the script's time over the sum of both.
    """
    key = ("width", "height")
    alone = _by_place(loop["rows"], "loop", key)
    header = ["size", "the loop alone"]
    found: dict[tuple[Any, ...], list[str]] = {
        place: [f"{place[0]}x{place[1]}", f"{ms:.2f}"] for place, ms in alone.items()
    }
    for name, announced in PLAIN.items():
        steps, model = (
            _by_place(figures["rows"], contender, key)
            for figures, contender in ((plain, name), (unet, announced))
        )
        precision = announced.removeprefix("ours-")
        header += [f"UNet, {precision}", f"a step, {precision}", "over the sum"]
        for place, cells in found.items():
            ratio = steps[place] / (model[place] + alone[place])
            cells += [f"{model[place]:.1f}", f"{steps[place]:.1f}", f"{ratio:.2f}"]
    return header, list(found.values())


def _by_place(
    rows: Sequence[dict[str, Any]], contender: str, key: Sequence[str]
) -> dict[tuple[Any, ...], float]:
    return {
        tuple(row.get(name) for name in key): row["ms_median"]
        for row in rows
        if row["contender"] == contender and "ms_median" in row
    }
