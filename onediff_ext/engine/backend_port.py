"""The port for backends, which compile exported blocks to graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

# A loaded graph takes the block's weights, then its input tensors, and returns its outputs.
Graph = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

# In a worker's environment: a folder where `Backend.build` may keep what its compiler makes for
# all graphs alike.
COMPILER_FILES_VARIABLE = "ONEDIFF_COMPILER_FILES"


class Backend(ABC):
    """Compiles and loads the graphs of block kinds.

    `build` runs in a worker process that has only torch. `load` runs in the host's process, where
    it must never compile.

    Attributes:
        name: One of `onediff_ext.core.options.BACKENDS`.
        capturable: Whether a CUDA graph may be recorded around its graphs.
        needs_restart: Whether this process can build no more, so that a new one has to.
    """

    name: str
    capturable = True
    needs_restart = False

    @abstractmethod
    def unavailable_reason(self, device: torch.device) -> str | None:
        """Say in one line why this backend cannot work here, or None when it can.

        Args:
            device: Where its graphs would run.

        Returns:
            A reason for people, such as a package or a torch version that is needed.
        """

    @abstractmethod
    def key_entries(self, device: torch.device) -> Mapping[str, str]:
        """Return the parts of a key that decide a graph's bytes and lie outside of the block.

        Args:
            device: Where the graph shall run.
        """

    def loading_steps(self, device: torch.device) -> Sequence[Callable[[], object]]:  # noqa: ARG002
        """Return what the first `load` would do once for all graphs, in steps of at most 0.5 s.

        Imports, above all. They may run in any thread, in order, or not at all. What this process
        has done already is left out. The default has none.

        Args:
            device: Where graphs will run.
        """
        return ()

    @abstractmethod
    def build(self, program: torch.export.ExportedProgram, device: torch.device) -> bytes:
        """Compile an exported block.

        Args:
            program: Takes (weights, *inputs), all flattened; batch, height,
                width and tokens are symbolic.
            device: Where the graph shall run.

        Returns:
            The graph in this backend's own format.

        Raises:
            BackendError: The block cannot be compiled; the reason is in the message.
        """

    def tuning(self, device: torch.device) -> str | None:  # noqa: ARG002
        """Name what `build_tuned` does. Graphs are tuned again when this text changes.

        Args:
            device: Where the graph shall run.

        Returns:
            The settings, for example; None, the default, where `build` does all there is.
        """
        return None

    def build_tuned(self, program: torch.export.ExportedProgram, device: torch.device) -> bytes:
        """As `build`, with what takes too long while somebody waits for the graph.

        It may measure on the device, which nothing else uses meanwhile.

        Args:
            program, device: As for `build`.

        Returns:
            A graph that takes the same arguments. It is compared and measured, so it need not be
            faster.

        Raises:
            BackendError: As for `build`.
        """
        raise NotImplementedError

    @abstractmethod
    def load(self, payload: bytes, device: torch.device) -> Graph:
        """Load a graph that `build` returned, without compiling.

        Args:
            payload: From `build`.
            device: Where the graph shall run.

        Returns:
            The graph, ready to be called.

        Raises:
            BackendError: The bytes cannot be loaded on this machine.
        """
