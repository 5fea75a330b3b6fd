"""One model of a host (a UNet, a VAE's decoder, a ControlNet) with graphs under its blocks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from onediff_ext.engine.families.base import BlockFamily
from onediff_ext.engine.kinds import Kind
from onediff_ext.engine.patch import Patches
from onediff_ext.engine.runner import BlockRunner
from onediff_ext.service.session import Session

logger = logging.getLogger(__name__)


class Component:
    """Puts a runner into each known block of a model, reversibly.

    Args:
        name: One of `onediff_ext.core.options.COMPONENTS`, with a number when there are several.
        model: The host's module; its own forward keeps running in Python.
        session: Who owns the kinds.
    """

    def __init__(self, name: str, model: nn.Module, session: Session) -> None:
        self.name, self.model, self._session = name, model, session
        self._patches = Patches()
        self.runners: list[BlockRunner] = []

    def install(self) -> None:
        """Replace the forwards of the model's known blocks and of the model itself."""
        for block, family in _known_blocks(self.model, self._session.families):
            runner = BlockRunner(block, family, block.forward, self._session)
            self._patches.set(block, "forward", runner)
            self.runners.append(runner)
        forward = _BuildAfterForward(self.model.forward, self._session)
        self._patches.set(self.model, "forward", forward)

    def remove(self) -> None:
        """Leave every attribute as it was before `install`."""
        for runner in self.runners:
            runner.active = False  # somebody may still hold it
        left = self._patches.undo()
        if left:
            logger.warning(
                "%s: another extension has replaced %s since; ours now only passes calls on",
                self.name,
                ", ".join(left),
            )
        self.runners = []

    def kinds(self) -> list[Kind]:
        """The kinds that this component's blocks have used, each once."""
        blocks = {id(runner.block) for runner in self.runners}
        return [kind for kind in self._session.kinds if kind.blocks & blocks]


class _BuildAfterForward:
    """A model's forward that builds what it found missing, after the result is there.

    A switch from eager to graphs therefore never falls into the middle of a forward.
    """

    def __init__(self, forward: Callable[..., Any], session: Session) -> None:
        self._forward, self._session = forward, session

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self._forward, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._session.forward():
            output = self._forward(*args, **kwargs)
        self._session.after_forward()
        return output


def _known_blocks(
    model: nn.Module, families: tuple[BlockFamily, ...] | Any
) -> list[tuple[nn.Module, BlockFamily]]:
    """The outermost blocks of known classes; what lies inside one belongs to its graph."""
    by_class = {cls: family for family in families if (cls := family.block_class()) is not None}
    found: list[tuple[nn.Module, BlockFamily]] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            family = by_class.get(type(child))
            if family is None:
                visit(child)
            else:
                found.append((child, family))

    visit(model)
    return found
