"""The panel's port: what the panel, the API and the graph library need from the program that draws.

`WebUIPanelHost` serves the panel inside a WebUI, `StandalonePanelHost` the stand-alone page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onediff_ext.core.errors import OptionError
from onediff_ext.core.gpu_advice import small_gpu_advice
from onediff_ext.core.shapes import BatchShape
from onediff_ext.core.status import Status
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.field_schema import schema
from onediff_ext.panel.fields import FEATURES
from onediff_ext.panel.phrases import ENGLISH, Phrases
from onediff_ext.pictures.sizes_used import sizes_used
from onediff_ext.store import GraphLibrary
from onediff_ext.store.stored_graph import graph_paths

if TYPE_CHECKING:
    import torch


class PanelHost(ABC):
    """The panel's only connection to the program around it."""

    @abstractmethod
    def status(self) -> Status:
        """The current status, with whether a warm-up runs and whether builds are paused."""

    @abstractmethod
    def warm_up(self, choices: Choices) -> Iterator[str]:
        """Make everything that the sizes of `choices` need. It ends a pause.

        Yields:
            ``""`` from time to time, and the result in the end; `status` has the progress.

        Raises:
            OneDiffError: The warm-up is impossible; the panel shows message and hint.
        """

    @abstractmethod
    def cancel(self) -> None:
        """End a warm-up, all builds and a pause at once; finished graphs stay.

        The next picture has its missing graphs built.
        """

    @abstractmethod
    def pause(self) -> None:
        """End builds at once, and start none until `go_on`; finished graphs stay.

        A running warm-up waits meanwhile, and goes on then.
        """

    @abstractmethod
    def go_on(self) -> None:
        """End a pause, and build what is missing beside the pictures."""

    @abstractmethod
    def library(self) -> GraphLibrary:
        """The graph store in use."""

    @abstractmethod
    def device(self) -> torch.device:
        """The device that pictures are drawn on."""

    @abstractmethod
    def picture_folders(self) -> Sequence[Path]:
        """The folders of finished pictures, for proposals of sizes; some may be missing."""

    def no_import_reason(self) -> str | None:
        """Why visitors cannot import graphs, which are native code; None when they can."""
        return None

    def features(self) -> frozenset[str]:
        """The entries of `fields.FEATURES` that this host offers."""
        return FEATURES

    def machine(self) -> str:
        """Digest of this machine, under which the store keeps measurements."""
        from onediff_ext.engine.machine import machine_digest

        return machine_digest(self.device())

    def name(self) -> str:
        """The program's name, for reports."""
        return "the stand-alone page"

    def phrases(self) -> Phrases:
        """The language of the panel's sentences."""
        return ENGLISH

    def file_of_module(self, name: str) -> str | None:  # noqa: ARG002
        """The file of a script that Python's modules do not list; None when it is unknown.

        Args:
            name: As the script's functions have it, such as ``"negpip.py"``.
        """
        return None

    def has_graphs(self) -> bool:
        """Whether the store has any graph."""
        folder = self.library().folder
        return next(iter(graph_paths(folder.graphs)), None) is not None

    def off_reason(self) -> str | None:
        """Why OneDiff is off by default, such as no GPU; None when it is on by default."""
        if self.device().type == "cuda":
            return None
        return "There is no GPU here, where graphs gain little: off unless you turn it on."

    def missing_reason(self) -> str | None:
        """The missing requirement of graphs with the command that installs it, or None."""
        from onediff_ext.backends.registry import no_graphs_reason

        return no_graphs_reason(self.device())

    def memory_note(self) -> str | None:
        """What fits into a small GPU, and how; None where most fits, and without a GPU."""
        device = self.device()
        if device.type != "cuda":
            return None
        import torch

        return small_gpu_advice(torch.cuda.get_device_properties(device).total_memory)

    def schema(self) -> dict[str, object]:
        """The fields with their defaults and choices, as plain values."""
        return schema(self.features())

    def recent_sizes(self) -> list[BatchShape]:
        """The sizes of the latest pictures, most frequent first."""
        return sizes_used([folder for folder in self.picture_folders() if folder.is_dir()])

    def warm_up_shapes(self, choices: Choices) -> list[BatchShape]:
        """The sizes to warm up: those of `choices`, or else of the latest pictures.

        Raises:
            OptionError: OneDiff is off, a choice needs a missing feature, or there is no size.
        """
        if not choices.enabled:
            raise OptionError("OneDiff is off.", "Turn it on to warm up.")
        choices.check_features(self.features())
        shapes = choices.warm_up_shapes() or self.recent_sizes()
        if not shapes:
            raise OptionError("There is no size to warm up.", 'Write for example "512x768".')
        return shapes
