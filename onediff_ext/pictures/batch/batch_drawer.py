"""The port through which a host draws the batches of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from PIL import Image

from onediff_ext.core.errors import OneDiffError, PictureError
from onediff_ext.pictures.batch.grouping import LoadedPicture, PlannedPicture

HostResultT = TypeVar("HostResultT")


@dataclass(frozen=True)
class BatchToDraw:
    """Images of one canvas size that are drawn together.

    Args:
        number: The place of the batch in the run, from 1.
        pictures: The images as read, at most the job's batch size.
        prepared: `BatchDrawer.prepare`'s result for their canvases.
    """

    number: int
    pictures: tuple[LoadedPicture, ...]
    prepared: Any

    @property
    def canvas_size_px(self) -> tuple[int, int]:
        """(width, height) of every canvas in the batch."""
        fit = self.pictures[0].planned.fit
        return fit.canvas_width_px, fit.canvas_height_px


@dataclass(frozen=True)
class DrawnPicture:
    """The outcome for one image.

    Args:
        source: The image it was drawn from.
        image: RGB image of the canvas size, or the reason why there is none.
        infotext: The `parameters` text of the result.
    """

    source: LoadedPicture
    image: Image.Image | PictureError
    infotext: str = ""


@dataclass(frozen=True)
class DrawnBatch(Generic[HostResultT]):
    """Images that were drawn together.

    Args:
        pictures: In the order of the batch.
        host_result: The host's own record; the drawer's hooks get it back.
    """

    pictures: Sequence[DrawnPicture]
    host_result: HostResultT


@dataclass(frozen=True)
class WrittenPicture:
    """A result in its file.

    Args:
        planned: The image it was drawn from.
        path: The PNG file.
        image: RGB image of the target size.
        infotext: As written.
    """

    planned: PlannedPicture
    path: Path
    image: Image.Image
    infotext: str


class BatchDrawer(ABC, Generic[HostResultT]):
    """Draws batches. A host implements `draw`; the other methods have defaults."""

    @abstractmethod
    def draw(self, batch: BatchToDraw) -> Iterable[DrawnBatch[HostResultT]]:
        """Draw one batch.

        Returns:
            The batch, or its parts as they are drawn. Images that are missing here stay undrawn;
            the next run draws them.
        """

    def prepare(self, canvases: list[Image.Image]) -> Any:
        """Convert canvases to what `draw` needs, in the reading thread; the images by default."""
        return canvases

    def is_stopped(self) -> bool:
        """Whether the run ends before the next batch."""
        return False

    def on_written(self, drawn: DrawnBatch[HostResultT], picture: WrittenPicture) -> None:
        """Take note of a written result, in the writing thread."""

    def on_batch_written(self, drawn: DrawnBatch[HostResultT], paths: list[Path]) -> None:
        """Take note that all results of a drawn batch are written, in the writing thread."""


class DrawerLostError(OneDiffError):
    """A drawer cannot draw any more; the run goes on without it."""


class FurtherDrawer(BatchDrawer[HostResultT]):
    """Draws batches of the same run beside the host's own drawer, in a thread of its own."""

    @abstractmethod
    def open(self, is_wanted: Callable[[], bool]) -> bool:
        """Get ready to draw.

        Args:
            is_wanted: Whether there is still something to draw.

        Returns:
            False when nothing was left to draw before it was ready.

        Raises:
            DrawerLostError: It cannot draw.
        """

    @abstractmethod
    def on_lost(self, exc: DrawerLostError) -> None:
        """Take note that it draws no more, in its own thread; the others draw what it had."""

    @abstractmethod
    def close(self) -> None:
        """End what `open` has started, in its own thread."""
