"""LoRAs as a user names them: ``FILE`` or ``FILE:WEIGHT``."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from onediff_ext.core.errors import OptionError
from onediff_ext.core.words import number_text

if TYPE_CHECKING:
    from onediff_ext.store import ContentHashes


def parse_lora(text: str) -> tuple[Path, float]:
    """Read ``FILE`` or ``FILE:WEIGHT``.

    Returns:
        (file, weight); the weight is 1 unless it is given.

    Raises:
        OptionError: The weight is not a number, or no file of this machine is named.
    """
    if "://" in text:
        raise OptionError(f"{text} is a URL, not a file.", "Download it, and name the file.")
    path, colon, weight = text.rpartition(":")
    if not path and (colon or not text):
        raise OptionError(f"{text!r} names no LoRA file.", "Write FILE.safetensors:0.8.")
    # os.path.exists: Path.exists raises for a name that is too long. C:\file and \\?\C:\file are
    # paths of Windows.
    if not colon or len(path) == 1 or weight[:1] in ("\\", "/") or os.path.exists(text):
        return Path(text), 1.0
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise OptionError(f"{weight!r} is no LoRA weight.", "Write FILE.safetensors:0.8.")
    return Path(path), number


def parse_lora_lines(text: str) -> list[tuple[Path, float]]:
    """Read LoRAs, one a line; empty lines are ignored.

    Raises:
        OptionError: A weight is not a number.
    """
    return [parse_lora(line.strip()) for line in text.splitlines() if line.strip()]


def lora_identities(loras: Iterable[tuple[Path, float]], hashes: ContentHashes) -> list[str]:
    """Return what decides an image of each LoRA: ``NAME:WEIGHT:HASH``.

    Raises:
        CheckpointError: A file cannot be read.
    """
    return [
        f"{path.stem}:{number_text(weight)}:{hashes.content_hash(path)[:12]}"
        for path, weight in loras
    ]
