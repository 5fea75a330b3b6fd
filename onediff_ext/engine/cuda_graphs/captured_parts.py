"""A model that cannot be captured as a whole: its parts are, one by one.

ControlNet for A1111 calls a UNet's parts from a forward of its own, which waits for the GPU and
follows a schedule that its arguments do not show. What it calls are still the model's own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import nn

from onediff_ext.engine.cuda_graphs.captured_forward import CapturedForward


def parts_of(model: nn.Module, blocks: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The modules that a model's forward most likely calls one after another: its children, and
    those in its lists, as far as any of these blocks lies within one."""
    wanted = set(map(id, blocks))
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from parts_of(child, blocks)
        elif any(id(inner) in wanted for inner in child.modules() if inner is not child):
            yield child


class CapturedParts:
    """Stands for a forward that is not the model's own, while that calls the model's parts.

    Args:
        forward: What runs as the model's forward.
        parts: Stand for the forwards of its parts, each of which gives way when memory is short.
        reason: Why the forward itself is not captured.

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
        # Once only, also when memory is short: it may count its calls.
        return self._forward(*args, **kwargs)

    @property
    def replayed(self) -> bool:
        """Whether each part's last call was replayed, and needed no comparison any more."""
        return all(part.replayed for part in self._parts)
