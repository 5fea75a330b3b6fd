"""What the WebUI and its processes on other GPUs say to each other, as pickled objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VARIABLE = "ONEDIFF_BATCH_WORKER"
"""The environment variable that makes a WebUI one of these processes: a `Connection` as JSON."""

Layout = tuple[tuple[str, int, int], ...]
"""(title, first argument, end of arguments) of each script of img2img."""


@dataclass(frozen=True)
class Ready:
    """The first message of a process.

    Args:
        layout: Of its scripts.
    """

    layout: Layout


@dataclass(frozen=True)
class Draw:
    """Draw one img2img job.

    Args:
        attributes: Of the host's processing object.
        script_args: The arguments of all scripts.
        checkpoint: The title of the host's checkpoint, or "".
    """

    attributes: dict[str, Any]
    script_args: tuple[Any, ...]
    checkpoint: str


@dataclass(frozen=True)
class Drawn:
    """The answer to `Draw`.

    Args:
        images: In the order of the job.
        infotexts: One for each.
        model: From `batch_job.model_of`.
    """

    images: list[Any]
    infotexts: list[str]
    model: tuple[str, ...]


@dataclass(frozen=True)
class Failed:
    """The other answer to `Draw`.

    Args:
        reason: One line.
    """

    reason: str


@dataclass(frozen=True)
class Interrupt:
    """Stop the job that is being drawn; its answer follows."""


@dataclass(frozen=True)
class End:
    """End the process."""
