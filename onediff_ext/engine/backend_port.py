"""The port between the engine and whatever turns a block into a graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

# A loaded graph: the block's weights followed by its input tensors → the block's output.
Graph = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class Backend(ABC):
    """Builds, saves, loads and runs the graph of one kind.

    `build` runs in a worker process that has nothing but torch; `load` in the
    process that draws pictures, where it must never compile.

    Attributes:
        name: One of `onediff_ext.core.options.BACKENDS`.
        capturable: Whether a CUDA graph may be recorded around its graphs.
        needs_restart: Whether this process can build nothing more, and a new one has to.
    """

    name: str
    capturable = True
    needs_restart = False

    @abstractmethod
    def unavailable_reason(self, device: torch.device) -> str | None:
        """Say in one line why this backend cannot work here, or None when it can."""

    @abstractmethod
    def key_entries(self, device: torch.device) -> Mapping[str, str]:
        """Name everything outside the block that decides the bytes of a graph."""

    def prepare_to_load(self, device: torch.device) -> None:  # noqa: B027
        """Import what `load` needs, which may take seconds; the default needs nothing."""

    @abstractmethod
    def build(self, program: torch.export.ExportedProgram, device: torch.device) -> bytes:
        """Compile an exported block.

        Args:
            program: Takes (weights, *inputs), all flattened; batch, height,
                width and tokens are symbolic.

        Raises:
            BackendError: The block cannot be compiled; the reason is in the message.
        """

    @abstractmethod
    def load(self, payload: bytes, device: torch.device) -> Graph:
        """Make what `build` returned callable, without compiling anything.

        Raises:
            BackendError: The bytes cannot be loaded on this machine.
        """
