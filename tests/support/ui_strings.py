"""The texts of a Gradio page that a user reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def texts_of(blocks: Any) -> Iterator[str]:
    """Labels, help, choices, placeholders and buttons of a gradio Blocks."""
    for block in blocks.blocks.values():
        for name in ("label", "info", "placeholder"):
            text = getattr(block, name, None)
            if isinstance(text, str) and text:
                yield text
        if type(block).__name__ == "Button" and block.value:
            yield block.value
        for choice in getattr(block, "choices", None) or ():
            yield choice[0] if isinstance(choice, tuple) else choice
