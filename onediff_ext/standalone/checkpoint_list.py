"""The list of checkpoints that the page offers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onediff_ext.core.demo_files import DEMO_MODEL

_NO_CHECKPOINT = ("lora", "vae", "controlnet", "embedding")


def known_models(current: Path, folders: Sequence[Path] = ()) -> list[str]:
    """Return the current checkpoint, the files beside it, those of the folders, and the demo."""
    found = {str(current): None}
    for folder in (current.parent, *folders):
        if folder == DEMO_MODEL.parent:
            continue
        for path in sorted(folder.glob("*.safetensors")):
            if not any(word in path.stem.lower() for word in _NO_CHECKPOINT):
                found[str(path)] = None
    if DEMO_MODEL.exists():
        found[str(DEMO_MODEL)] = None
    return list(found)
