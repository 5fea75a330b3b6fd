"""Doubles of the port that draws batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import ImageOps

from onediff_ext.core.errors import PictureError
from onediff_ext.pictures.batch.batch_drawer import (
    BatchDrawer,
    BatchToDraw,
    DrawnBatch,
    DrawnPicture,
    WrittenPicture,
)


class InvertingDrawer(BatchDrawer[int]):
    """Draws by inverting, in parts of at most `part_size`; keeps what the loop told it.

    Args:
        part_size: Images in a drawn part, at most.
        failing: Names of inputs that cannot be drawn.
        is_stopped: Asked before each batch.
    """

    def __init__(
        self,
        part_size: int = 64,
        failing: tuple[str, ...] = (),
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._part_size, self._failing, self._is_stopped = part_size, failing, is_stopped
        self.drawn: list[tuple[int, tuple[int, int], list[str]]] = []
        self.written: list[tuple[int, WrittenPicture]] = []
        self.batches_written: list[tuple[int, list[Path]]] = []

    def is_stopped(self) -> bool:
        return self._is_stopped()

    def draw(self, batch: BatchToDraw) -> Iterator[DrawnBatch[int]]:
        names = [loaded.planned.header.path.name for loaded in batch.pictures]
        self.drawn.append((batch.number, batch.canvas_size_px, names))
        pairs = list(zip(batch.pictures, batch.prepared, strict=True))
        for start in range(0, len(pairs), self._part_size):
            part = [
                DrawnPicture(source, PictureError("It cannot be drawn."))
                if source.planned.header.path.name in self._failing
                else DrawnPicture(source, ImageOps.invert(canvas), f"a cat {source.planned.index}")
                for source, canvas in pairs[start : start + self._part_size]
            ]
            yield DrawnBatch(part, batch.number)

    def on_written(self, drawn: DrawnBatch[int], picture: WrittenPicture) -> None:
        self.written.append((drawn.host_result, picture))

    def on_batch_written(self, drawn: DrawnBatch[int], paths: list[Path]) -> None:
        self.batches_written.append((drawn.host_result, paths))
