"""The list of checkpoints that the page offers."""

from __future__ import annotations

from pathlib import Path

from onediff_ext.core.demo_files import DEMO_MODEL

_NO_CHECKPOINT = ("lora", "vae", "controlnet", "embedding")


def known_models(current: Path) -> list[str]:
    """Return the current checkpoint, the files beside it, and the demo."""
    found = {str(current): None}
    if current.parent != DEMO_MODEL.parent:
        for path in sorted(current.parent.glob("*.safetensors")):
            if not any(word in path.stem.lower() for word in _NO_CHECKPOINT):
                found[str(path)] = None
    if DEMO_MODEL.exists():
        found[str(DEMO_MODEL)] = None
    return list(found)
