"""The port to what a worker does: the program travels to the worker and is opened there once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from onediff_ext.store import GraphExchange


class OpenProgram(ABC):
    """A program with its models loaded. Threads read and write; one thread draws."""

    @abstractmethod
    def read(self, task: Any) -> Any:
        """Read a unit's inputs, in any thread."""

    @abstractmethod
    def draw(self, read: Any) -> Any:
        """Draw a unit, always in the same thread."""

    @abstractmethod
    def write(self, drawn: Any) -> Any:
        """Write a unit's results, in any thread; return what the driver gets."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Return plain values about this worker, such as its device and its graphs."""

    @abstractmethod
    def close(self) -> None:
        """End builds that still run."""


class Program(ABC):
    """What all workers of a run do. Pickled on the driver, so it holds plain values only."""

    @abstractmethod
    def open(self, name: str, exchange: GraphExchange | None, prepared: Any = None) -> OpenProgram:
        """Load the models.

        Args:
            name: Of the worker.
            exchange: Where graphs are shared; None where all workers share one store.
            prepared: What the worker's preparation returned, in the same thread; None without one.

        Raises:
            OneDiffError: The run cannot be done, by any worker.
        """
