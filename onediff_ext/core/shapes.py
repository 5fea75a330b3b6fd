"""Image sizes: rounding to latent cells, and lists such as ``512x768, 1024x1024@2``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onediff_ext.core.errors import ShapeError

CELL_PX = 8
MIN_SIDE_PX = 64
MAX_SIDE_PX = 4096
MAX_BATCH = 64
MAX_SIZES = 256
MAX_SIZES_CHARS = 8192

_EXAMPLE_HINT = (
    'Write sizes as WIDTHxHEIGHT or WIDTHxHEIGHT@BATCH, for example "512x768, 1024x1024@2".'
)
_WIDTH_HEIGHT = re.compile(r"\s*(\d{1,9})\s*[x×*]\s*(\d{1,9})\s*", re.ASCII | re.IGNORECASE)
_BATCH = re.compile(r"\d{1,9}", re.ASCII)
SIZE_SEPARATORS = re.compile(r"[,;\s]+")
_JOINTS = str.maketrans({"x": " x ", "×": " x ", "*": " x ", "@": " @ "})
_SHOWN_CHARS = 40


@dataclass(frozen=True, order=True)
class BatchShape:
    """An image size and a batch size.

    Args:
        width_px, height_px: Image size in pixels, multiples of 8.
        batch: Images generated at once, at least 1.
    """

    width_px: int
    height_px: int
    batch: int = 1

    def __str__(self) -> str:
        size = f"{self.width_px}x{self.height_px}"
        return size if self.batch == 1 else f"{size}@{self.batch}"


def round_up(height_px: int, width_px: int, step_px: int = CELL_PX) -> tuple[int, int]:
    """Round an image size up to whole latent cells.

    Args:
        height_px, width_px: Image size in pixels.
        step_px: Pixels per latent cell; 8 for every Stable Diffusion VAE.

    Returns:
        (height, width) in latent cells.

    Raises:
        ShapeError: A side or the step is not positive.

    Source: latent stride f=8, Rombach et al. 2022, arXiv:2112.10752.
    """
    if height_px < 1 or width_px < 1 or step_px < 1:
        raise ShapeError(
            f"An image of {width_px}x{height_px} pixels cannot be cut into cells of {step_px}.",
            "Both sides must be at least one pixel.",
        )
    return -(-height_px // step_px), -(-width_px // step_px)


def parse_width_height(text: str) -> tuple[int, int] | None:
    """Read one size such as ``512x768``; ``×``, ``*`` and spaces around them are accepted.

    Returns:
        (width, height) in pixels, of any value; None when the text is not a size.
    """
    match = _WIDTH_HEIGHT.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2]))


def parse_sizes(text: str) -> list[BatchShape]:
    """Read a list of sizes that a person typed.

    Args:
        text: ``WIDTHxHEIGHT`` or ``WIDTHxHEIGHT@BATCH``, separated by commas,
            semicolons, spaces or line ends.

    Returns:
        The sizes in the given order without duplicates; empty for an empty text.

    Raises:
        ShapeError: An entry is not a size or cannot be generated, or the text is longer than
            `MAX_SIZES_CHARS` or has more than `MAX_SIZES` entries.
    """
    if len(text) > MAX_SIZES_CHARS:
        raise ShapeError(
            f"The list of sizes has {len(text):,} characters; {MAX_SIZES_CHARS:,} are allowed.",
            _EXAMPLE_HINT,
        )
    # "512 x 768" becomes "512x768". Splitting and joining takes linear time; a pattern with
    # spaces around the "x" takes quadratic time on a run of spaces.
    spaced = f" {' '.join(text.lower().translate(_JOINTS).split())} "
    closed_up = spaced.replace(" x ", "x").replace(" @ ", "@")
    entries = [entry for entry in SIZE_SEPARATORS.split(closed_up) if entry]
    if len(entries) > MAX_SIZES:
        raise ShapeError(
            f"The list has {len(entries):,} sizes; {MAX_SIZES} are allowed.",
            "Warm up a part of them at a time.",
        )
    return list(dict.fromkeys(_parse_size(entry) for entry in entries))


def nearest_side_px(side_px: int) -> int:
    """Return the nearest allowed side of an image."""
    nearest = (side_px + CELL_PX // 2) // CELL_PX * CELL_PX
    return min(max(nearest, MIN_SIDE_PX), MAX_SIDE_PX)


def nearest_shape(width_px: int, height_px: int, batch: int = 1) -> BatchShape:
    """Return the size nearest to this one that images may be generated at."""
    return BatchShape(nearest_side_px(width_px), nearest_side_px(height_px), batch)


def _parse_size(entry: str) -> BatchShape:
    size_text, at, batch_text = entry.partition("@")
    size = parse_width_height(size_text)
    if size is None or (at and not _BATCH.fullmatch(batch_text)):
        entry = entry if len(entry) <= _SHOWN_CHARS else f"{entry[:_SHOWN_CHARS]}…"
        raise ShapeError(f'"{entry}" is not a size.', _EXAMPLE_HINT)
    batch = int(batch_text) if at else 1
    if not 1 <= batch <= MAX_BATCH:
        raise ShapeError(
            f'"{entry}" asks for {batch} images at once.', f"Use 1 to {MAX_BATCH} after the @."
        )
    nearest = nearest_shape(*size, batch)
    if size != (nearest.width_px, nearest.height_px):
        raise ShapeError(
            f'"{entry}" cannot be generated: each side must be a multiple of {CELL_PX} '
            f"from {MIN_SIDE_PX} to {MAX_SIDE_PX}.",
            f"The nearest size is {nearest}.",
        )
    return nearest
