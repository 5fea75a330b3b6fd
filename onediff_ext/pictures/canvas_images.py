"""Puts an image on its canvas, and cuts the result out of a generated canvas."""

from __future__ import annotations

from PIL import Image

from onediff_ext.core.errors import ShapeError
from onediff_ext.pictures.canvas_sizes import Fit

_LANCZOS = Image.Resampling.LANCZOS


def to_target(image: Image.Image, fit: Fit) -> Image.Image:
    """Resize an image, or its alpha, to the target size.

    Raises:
        ShapeError: The image has another size than the fit's source.
    """
    if image.size != (fit.source_width_px, fit.source_height_px):
        raise ShapeError(
            f"The picture has {image.width}x{image.height} pixels, "
            f"not {fit.source_width_px}x{fit.source_height_px} as its header said.",
            "It was changed since the run began; start the run again.",
        )
    target = (fit.target_width_px, fit.target_height_px)
    if image.size == target:
        return image
    if fit.placement == "crop":
        return image.resize(target, _LANCZOS, box=_centre_box(image.size, target))
    if fit.placement == "stretch":
        return image.resize(target, _LANCZOS)
    inner = image.resize(_inner_size(image.size, target), _LANCZOS)
    left, top = (target[0] - inner.width) // 2, (target[1] - inner.height) // 2
    return _repeat_edges(inner, target, left, top)


def to_canvas(image: Image.Image, fit: Fit) -> Image.Image:
    """Resize an image to its target, and repeat its edges to the right and below.

    Returns:
        An image of the canvas size.

    Raises:
        ShapeError: The image has another size than the fit's source.
    """
    canvas = (fit.canvas_width_px, fit.canvas_height_px)
    return _repeat_edges(to_target(image, fit), canvas, 0, 0)


def from_canvas(image: Image.Image, fit: Fit) -> Image.Image:
    """Cut the target out of a generated canvas.

    Raises:
        ShapeError: The generated image does not have the canvas size.
    """
    if image.size != (fit.canvas_width_px, fit.canvas_height_px):
        raise ShapeError(
            f"The generated picture has {image.width}x{image.height} pixels, "
            f"not {fit.canvas_width_px}x{fit.canvas_height_px}.",
            "Please report this.",
        )
    if image.size == (fit.target_width_px, fit.target_height_px):
        return image
    return image.crop((0, 0, fit.target_width_px, fit.target_height_px))


def _centre_box(
    source: tuple[int, int], target: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Return the largest centred box of the source with the target's proportions."""
    scale = min(source[0] / target[0], source[1] / target[1])
    width, height = min(target[0] * scale, source[0]), min(target[1] * scale, source[1])
    left, top = (source[0] - width) / 2, (source[1] - height) / 2
    return left, top, left + width, top + height


def _inner_size(source: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    scale = min(target[0] / source[0], target[1] / source[1])
    width, height = (max(1, round(side * scale)) for side in source)
    return min(width, target[0]), min(height, target[1])


def _repeat_edges(image: Image.Image, size: tuple[int, int], left: int, top: int) -> Image.Image:
    if image.size == size:
        return image
    right, bottom = left + image.width, top + image.height
    canvas = Image.new(image.mode, size)
    canvas.paste(image, (left, top))
    # First the columns beside the picture, then whole rows above and below it.
    _copy_strip(canvas, (left, top, left + 1, bottom), (0, top, left, bottom))
    _copy_strip(canvas, (right - 1, top, right, bottom), (right, top, size[0], bottom))
    _copy_strip(canvas, (0, top, size[0], top + 1), (0, 0, size[0], top))
    _copy_strip(canvas, (0, bottom - 1, size[0], bottom), (0, bottom, size[0], size[1]))
    return canvas


def _copy_strip(
    canvas: Image.Image, edge: tuple[int, int, int, int], strip: tuple[int, int, int, int]
) -> None:
    size = strip[2] - strip[0], strip[3] - strip[1]
    if min(size) > 0:
        canvas.paste(canvas.crop(edge).resize(size, Image.Resampling.NEAREST), strip)
