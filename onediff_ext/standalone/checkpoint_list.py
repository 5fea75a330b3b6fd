"""Which checkpoints the page offers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from onediff_ext.core.errors import OptionError

DEMO = Path(__file__).resolve().parents[1] / "assets" / "demo" / "onediff-demo.safetensors"
DEMO_LORA = DEMO.with_name("onediff-demo-sketch-lora.safetensors")
_NO_CHECKPOINT = ("lora", "vae", "controlnet", "embedding")


def known_models(current: Path, folders: Sequence[Path] = ()) -> list[str]:
    """The current checkpoint, its neighbours, those of the folders, and the demo."""
    found = {str(current): None}
    for folder in (current.parent, *folders):
        if folder == DEMO.parent:
            continue
        for path in sorted(folder.glob("*.safetensors")):
            if not any(word in path.stem.lower() for word in _NO_CHECKPOINT):
                found[str(path)] = None
    if DEMO.exists():
        found[str(DEMO)] = None
    return list(found)


def parse_loras(text: str) -> list[tuple[Path, float]]:
    """Read ``FILE`` or ``FILE:WEIGHT``, one a line.

    Raises:
        OptionError: A weight is no number.
    """
    loras = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        path, colon, weight = line.rpartition(":")
        # Not Path's own test, which raises for a name that is too long. C:\file is a Windows path.
        if not colon or len(path) == 1 or os.path.exists(line):
            loras.append((Path(line), 1.0))
            continue
        try:
            loras.append((Path(path), float(weight)))
        except ValueError:
            raise OptionError(
                f"{weight!r} is no LoRA weight.", "Write FILE.safetensors:0.8."
            ) from None
    return loras
