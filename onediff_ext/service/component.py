"""One model of a host (a UNet, a VAE's decoder, a ControlNet) with graphs under its blocks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from onediff_ext.engine.accumulation import accumulation
from onediff_ext.engine.attributes import Attributes
from onediff_ext.engine.capture.forward import CapturedForward
from onediff_ext.engine.capture.ladder import MemoryLadder
from onediff_ext.engine.capture.parts import CapturedParts, parts_of
from onediff_ext.engine.capture.watch import Known, foreign_forward
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

    Attributes:
        runners: One for each block.
        captured: The model's forward as a CUDA graph, or its parts as several, while installed.
            None for a VAE, which runs once for a picture, and at large sizes needs all the
            memory there is.
        foreign: Why the model's forward is not its own: another extension's, which calls the
            blocks from there. None if it is, or nothing is installed.
    """

    def __init__(self, name: str, model: nn.Module, session: Session) -> None:
        self.name, self.model, self._session = name, model, session
        families = session.families
        self._known = Known(
            sorted({source for family in families for source in family.sources}),
            session.rules,
            sorted({patcher for family in families for patcher in family.patchers}),
            frozenset().union(*(family.transient for family in families)),
        )
        self._patches = Patches()
        self.runners: list[BlockRunner] = []
        self.captured: CapturedForward | CapturedParts | None = None
        self.foreign: str | None = None
        self._whole: _ModelForward | None = None
        self._parts: list[CapturedForward] = []
        self._attributes: Attributes | None = None

    def install(self) -> None:
        """Replace the forwards of the model's known blocks and of the model itself.

        After `suspend`, the same runners and captures go on, if the model still is the same.
        """
        if not (self.runners and self._put_back()):
            for block, family in _known_blocks(self.model, self._session.families):
                runner = BlockRunner(block, family, getattr(block, family.method), self._session)
                self._patches.set(block, family.method, runner)
                self.runners.append(runner)
        eager, captures = self.model.forward, self._session.captures
        reason = foreign_forward(self.model, eager, self._known)
        if self.name.startswith("vae"):
            ladder = MemoryLadder(eager, captures, self._without_graphs)
            forward = _ModelForward(eager, ladder, self._session)
        elif reason is None:
            forward = self._whole_forward(eager)
            self.captured = forward.captured
        else:
            self.foreign = reason
            self.captured = CapturedParts(eager, self._part_forwards(), captures, reason)
            forward = _ModelForward(eager, self.captured, self._session)
        self._patches.set(self.model, "forward", forward)
        self._set_active(True)

    def _whole_forward(self, eager: Callable[..., Any]) -> _ModelForward:
        """The same one in each job: captures are given up when a model has got another one."""
        if self._whole is not None and self._whole.eager != eager:
            self._forget_whole()
        if self._whole is None:
            captured = CapturedForward(
                self.model, eager, self.runners, self._session.captures, self._known
            )
            self._whole = _ModelForward(eager, captured, self._session)
        return self._whole

    def _forget_whole(self) -> None:
        if self._whole is not None and self._whole.captured is not None:
            self._whole.captured.forget()
        self._whole = None

    def _part_forwards(self) -> list[CapturedForward]:
        """Put captures under the model's parts; they go on with the same ones in the next job."""
        if any(part.eager != part.model.forward for part in self._parts):
            self._forget_parts()
        if not self._parts:
            parts = [
                part
                for part in parts_of(self.model, [runner.block for runner in self.runners])
                if foreign_forward(part, part.forward, self._known) is None
            ]
            for part in parts:
                inside = set(part.modules())
                runners = [runner for runner in self.runners if runner.block in inside]
                captures, share = self._session.captures, 1 / len(parts)
                self._parts.append(
                    CapturedForward(part, part.forward, runners, captures, self._known, share)
                )
        for captured in self._parts:
            self._patches.set(captured.model, "forward", captured)
        return self._parts

    def remove(self) -> None:
        """Leave every attribute as it was before `install`, and drop the captures."""
        self.suspend()
        self._attributes = None
        self._forget_parts()
        self._forget_whole()
        self.runners = []

    def _forget_parts(self) -> None:
        for part in self._parts:
            part.forget()
        self._parts = []

    def suspend(self) -> None:
        """Leave every attribute as it was before `install`, and be ready to install again."""
        self._set_active(False)  # somebody may still hold a runner
        left = self._patches.undo()
        self._attributes = self._look()
        # A foreign forward may hold models that are nobody else's any more.
        self.captured = self.foreign = None
        if left:
            logger.warning(
                "%s: another extension has replaced %s since; ours now only passes calls on",
                self.name,
                ", ".join(left),
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the model's own blocks for the length of a ``with`` block."""
        self._set_active(False)
        try:
            yield
        finally:
            self._set_active(True)

    @contextmanager
    def _without_graphs(self) -> Iterator[None]:
        """`paused`, told."""
        self._session.fell_back(self.name.replace("vae_", "VAE "), "memory is short")
        with self.paused():
            yield

    def _set_active(self, active: bool) -> None:
        ours: list[BlockRunner | CapturedForward | CapturedParts] = [*self.runners, *self._parts]
        if self.captured is not None:
            ours.append(self.captured)
        for each in ours:
            each.active = active

    def _put_back(self) -> bool:
        """Install the runners that were suspended; nothing is left of them when blocks or their
        forwards are others now."""
        blocks = _known_blocks(self.model, self._session.families)
        parked = [(runner.block, runner.family, runner.eager) for runner in self.runners]
        if [(block, family, getattr(block, family.method)) for block, family in blocks] != parked:
            self.remove()
            return False
        if self._attributes is None or not self._attributes.same(self._look()):
            for runner in self.runners:
                runner.tree = None  # looked at anew
        for runner in self.runners:
            self._patches.set(runner.block, runner.family.method, runner)
        return True

    def _look(self) -> Attributes:
        transient = {name for family in self._session.families for name in family.transient}
        return Attributes(self.model, transient)

    def kinds(self) -> list[Kind]:
        """The kinds that this component's blocks have used, each once."""
        blocks = {runner.block for runner in self.runners}
        return [kind for kind in self._session.kinds if not blocks.isdisjoint(kind.blocks)]


class _ModelForward:
    """A model's forward that builds what it found missing, after the result is there.

    A switch from eager to graphs therefore never falls into the middle of a forward.
    """

    def __init__(
        self, eager: Callable[..., Any], forward: Callable[..., Any], session: Session
    ) -> None:
        self.eager, self._forward, self._session = eager, forward, session
        self.captured = forward if isinstance(forward, CapturedForward) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.eager, memo)

    @property
    def variant(self) -> Hashable:
        """As `CapturedForward` has it."""
        return None if self.captured is None else self.captured.variant

    @variant.setter
    def variant(self, value: Hashable) -> None:
        if self.captured is not None:
            self.captured.variant = value

    @property
    def keeps(self) -> object:
        """As `CapturedForward` has it."""
        return None if self.captured is None else self.captured.keeps

    @keeps.setter
    def keeps(self, value: object) -> None:
        if self.captured is not None:
            self.captured.keeps = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._session.forward(), accumulation(self._session.precision):
            output = self._forward(*args, **kwargs)
        self._session.after_forward()
        return output


def _known_blocks(
    model: nn.Module, families: Sequence[BlockFamily]
) -> list[tuple[nn.Module, BlockFamily]]:
    """The outermost blocks of known classes; what lies inside one belongs to its graph.

    A family that stands for a part of a block only leaves the rest to others.
    """
    by_class: dict[type, list[BlockFamily]] = {}
    for family in families:
        cls = family.block_class()
        if cls is not None:
            by_class.setdefault(cls, []).append(family)
    found: list[tuple[nn.Module, BlockFamily]] = []

    def visit(module: nn.Module, taken: frozenset[str]) -> None:
        for name, child in module.named_children():
            if name in taken:
                continue
            known = by_class.get(type(child), [])
            found.extend((child, family) for family in known)
            if all(family.parts is not None for family in known):
                visit(child, frozenset(part for family in known for part in family.parts or ()))

    visit(model, frozenset())
    return found
