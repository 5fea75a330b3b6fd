"""The panel's list of warm-up sizes, as chips."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onediff_ext.core.shapes import BatchShape, nearest_shape, parse_width_height


def with_sizes_added(chips: Sequence[str], more: Iterable[BatchShape]) -> list[str]:
    """Add sizes to the chips; each size appears once.

    Args:
        chips: What the list shows.
        more: The sizes to add.
    """
    return list(dict.fromkeys([*chips, *map(str, more)]))


def read_tab_size(text: str) -> BatchShape | None:
    """Return the size nearest to a tab's sliders; None where the page has none.

    Args:
        text: From `SizeSource`, such as ``"513x764@2"``.
    """
    size_text, _, batch_text = text.partition("@")
    size = parse_width_height(size_text)
    if size is None or not batch_text.isdecimal() or int(batch_text) < 1:
        return None
    return nearest_shape(*size, int(batch_text))
