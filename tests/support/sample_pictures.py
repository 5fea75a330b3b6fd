"""Small pictures for tests, and looking at what became of them."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageChops


def gradient(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A picture whose corners all differ, so that a turned or mirrored one is noticed."""
    ramp = Image.linear_gradient("L")
    across = ramp.transpose(Image.Transpose.ROTATE_90)
    parts = (ramp, across, ramp.transpose(Image.Transpose.FLIP_TOP_BOTTOM))
    return Image.merge("RGB", [part.resize((width, height)) for part in parts]).convert(mode)


def save_pictures(folder: Path, **sizes: tuple[int, int]) -> Path:
    """Save a PNG for each name and size; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in sizes.items():
        gradient(*size).save(folder / f"{name}.png")
    return folder


def difference(one: Path, other: Path) -> int:
    """Largest difference of two pictures of one size, of 255."""
    with Image.open(one) as a, Image.open(other) as b:
        assert a.size == b.size
        extrema = ImageChops.difference(a.convert("RGB"), b.convert("RGB")).getextrema()
    return max(high for _, high in extrema)


def infotext_of(path: Path) -> str:
    """The `parameters` text of a PNG."""
    with Image.open(path) as image:
        return str(image.text["parameters"])
