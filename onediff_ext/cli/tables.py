"""Plain text tables."""

from __future__ import annotations

from collections.abc import Sequence

from onediff_ext.core.words import printable


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table with columns as wide as their widest cell; all but the first right-aligned.

    Control characters are escaped, because cells may hold text from files.
    """
    cells = [[printable(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)
