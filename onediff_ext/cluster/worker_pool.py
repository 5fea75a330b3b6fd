"""The port to the workers of a run, as the coordinator sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """Something that happened to a worker.

    Args:
        worker: Its name.
    """

    worker: str


@dataclass(frozen=True)
class Ready(Event):
    """A worker has its models.

    Args:
        about: What it tells of itself, such as its device.
    """

    about: dict[str, Any]


@dataclass(frozen=True)
class Finished(Event):
    """A worker has done a unit.

    Args:
        ticket: Of the unit.
        outcome: What the program returned.
    """

    ticket: int
    outcome: Any


@dataclass(frozen=True)
class Returned(Event):
    """A worker gave a unit back that it had not begun to draw.

    Args:
        ticket: Of the unit.
    """

    ticket: int


@dataclass(frozen=True)
class Lost(Event):
    """A worker is gone, with all units that it had.

    Args:
        reason: One line.
        is_node: Its whole machine is gone: no unit is to blame.
        ticket: The unit whose error ended it; None when the process died.
        error: The error that ends the run, such as a missing checkpoint; None goes on without it.
        finished: Units that it had done, though nobody has asked for their answers yet.
    """

    reason: str
    is_node: bool = False
    ticket: int | None = None
    error: Exception | None = None
    finished: tuple[Finished, ...] = ()


class WorkerPool(ABC):
    """Starts workers and hands them units."""

    @abstractmethod
    def room(self) -> int:
        """Return how many more workers can be started now."""

    @abstractmethod
    def start(self) -> str:
        """Start a worker and return its name; `Ready` or `Lost` follows."""

    @abstractmethod
    def submit(self, worker: str, ticket: int, task: Any) -> None:
        """Hand a unit's task to a worker; `Finished`, `Returned` or `Lost` follows."""

    @abstractmethod
    def steal(self, worker: str, ticket: int) -> None:
        """Ask a worker for a unit back; `Returned` or `Finished` follows."""

    @abstractmethod
    def events(self, timeout_s: float) -> Sequence[Event]:
        """Wait for events, at most `timeout_s`."""

    @abstractmethod
    def close(self) -> None:
        """End all workers."""
