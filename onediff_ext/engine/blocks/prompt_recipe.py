"""What a host says about the part of a model's forward that depends on the prompt alone."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Arguments = Mapping[str, Any]


class PromptRecipe(ABC):
    """Knows the prompt's part of one model's forward.

    Attributes:
        prompt: Names of the arguments that it depends on, the first of which the result replaces.
        without: Names of arguments with which the forward runs as it is.
    """

    prompt: tuple[str, ...]
    without: tuple[str, ...] = ()

    @abstractmethod
    def layers(self, model: Any) -> Sequence[nn.Module]:
        """Return the layers that read only the prompt and return one tensor.

        Args:
            model: The host's module.
        """

    def blocks(self, model: Any) -> Sequence[nn.Module]:  # noqa: ARG002
        """Return the blocks that read only the prompt, and return their first argument, changed.

        Args:
            model: The host's module.

        Returns:
            Blocks that `compute` runs; in the forward after it each returns its first argument as
            it is. The default has none.
        """
        return ()

    def helpers(self, model: Any) -> Sequence[nn.Module]:  # noqa: ARG002
        """Return further modules whose code decides the result.

        Args:
            model: The host's module.

        Returns:
            Modules that `compute` calls, and modules around `layers` that the forward calls. The
            default has none.
        """
        return ()

    def parameters(self, model: Any) -> Sequence[torch.Tensor]:  # noqa: ARG002
        """Return further tensors that the result depends on.

        Args:
            model: The host's module.

        Returns:
            Weights and tables outside of `layers` and `blocks`. The default has none.
        """
        return ()

    @abstractmethod
    def compute(self, model: Any, arguments: Arguments) -> Any:
        """Compute the result with the host's own layers.

        Args:
            model: The host's module.
            arguments: Of its forward, by name.

        Returns:
            What the forward takes in place of the prompt; None for a call that it does not know.
        """


class Done(threading.local):
    """Whether the prompt's part of the forward that runs in this thread is done already."""

    now = False

    @contextmanager
    def set(self) -> Iterator[None]:
        """Set it for a ``with`` block."""
        self.now = True
        try:
            yield
        finally:
            self.now = False
