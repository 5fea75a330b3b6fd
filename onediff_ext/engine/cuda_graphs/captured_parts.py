"""CUDA graphs of a model's parts, for a model whose forward cannot be recorded as a whole.

A ControlNet extension may call a UNet's parts from a forward of its own. That forward waits for
the GPU and follows a schedule that its arguments do not show, but the parts are the model's own
modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import nn

from onediff_ext.engine.cuda_graphs.captured_forward import CapturedForward


def parts_of(model: nn.Module, blocks: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The modules that a model's forward most likely calls one after another.

    Args:
        model: The host's module.
        blocks: Blocks within it that run through graphs.

    Returns:
        The model's children, and those in its module lists, that contain one of the blocks.
    """
    wanted = set(map(id, blocks))
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from parts_of(child, blocks)
        elif any(id(inner) in wanted for inner in child.modules() if inner is not child):
            yield child


class CapturedParts:
    """Replaces a forward that is not the model's own and calls the model's parts.

    Args:
        forward: What runs as the model's forward.
        parts: Replace the forwards of its parts. Each has an OOM fallback of its own.
        reason: Why the forward itself is not recorded.

    Attributes:
        active: False lets every call through.
        reason: As given.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        parts: Sequence[CapturedForward],
        reason: str,
    ) -> None:
        self._forward, self._parts, self.reason = forward, parts, reason
        self.active = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Called once, also when memory is short: it may count its calls.
        return self._forward(*args, **kwargs)

    @property
    def replayed(self) -> bool:
        """Whether each part's last call was replayed and needed no comparison."""
        return all(part.replayed for part in self._parts)
