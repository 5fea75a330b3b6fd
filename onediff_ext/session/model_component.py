"""One model of a host (a UNet, a VAE's decoder, a ControlNet) with graphs under its blocks."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.engine.blocks.family import BlockFamily
from onediff_ext.engine.cuda_graphs.captured_forward import CapturedForward, retry_of
from onediff_ext.engine.cuda_graphs.captured_parts import CapturedParts, parts_of
from onediff_ext.engine.cuda_graphs.oom_fallback import OomFallback, Retry
from onediff_ext.engine.cuda_graphs.staleness import Snapshot, TrustedModules, foreign_forward
from onediff_ext.engine.patches import Patches
from onediff_ext.engine.running.block_runner import BlockRunner
from onediff_ext.engine.running.fp16_accumulation import accumulation
from onediff_ext.session.session import Session
from onediff_ext.session.weight_layouts import WeightLayouts

logger = logging.getLogger(__name__)

MEMORY_IS_SHORT = "memory is short"


class Component:
    """Puts a runner into each known block of a model, reversibly.

    Args:
        name: One of `onediff_ext.core.options.COMPONENTS`, with a number when there are several.
        model: The host's module; its own forward keeps running in Python.
        session: Who owns the kinds.
        channels_last: Bring convolution weights into that order, if the session's options say so.

    Attributes:
        session: As given.
        runners: One for each block.
        captured: The model's forward as a CUDA graph, or its parts as several, while installed.
            None for a VAE, which runs once for a picture, and at large sizes needs all the
            memory there is.
        layouts: What was changed about the weights' order in memory.
        foreign: Why the model's forward is not its own: another extension's, which calls the
            blocks from there. None if it is, or nothing is installed.
    """

    def __init__(
        self, name: str, model: nn.Module, session: Session, channels_last: bool = False
    ) -> None:
        self.name, self.model, self.session = name, model, session
        families = session.families
        self._known = TrustedModules(
            sorted({source for family in families for source in family.sources}),
            session.rules,
            sorted({patcher for family in families for patcher in family.trusted_patchers}),
            frozenset().union(*(family.ignored_attrs for family in families)),
            sorted({name for family in families for name in family.dynamic_weight_attrs}),
            frozenset(name for family in families for name in family.per_image),
            session.code,
        )
        self._patches = Patches()
        self.runners: list[BlockRunner] = []
        self.captured: CapturedForward | CapturedParts | None = None
        self.foreign: str | None = None
        self._channels_last, self.layouts = channels_last, WeightLayouts()
        # Others that serve the same model: who came after this one, and who made way for it.
        self._above: Callable[[], Component | None] = _nobody
        self._below: Callable[[], Component | None] = _nobody
        self._whole: _ModelForward | None = None
        self._parts: list[CapturedForward] = []

    def install(self) -> None:
        """Replace the forwards of the model's known blocks and of the model itself.

        After `suspend`, the same runners and captures go on, if the model still is the same.
        Another component that serves the model makes way until this one is removed: a graph has
        to be compared with the model's own forward, not with another graph.
        """
        other = _serving(self.model)
        if other is not None and other is not self:
            self._leave_stack()
            other.suspend()
            self._below, other._above = weakref.ref(other), weakref.ref(self)
        if self.session.options.channels_last and self._channels_last:
            self.layouts.use_channels_last(self.model)
        if not (self.runners and self._put_back()):
            for block, family in _known_blocks(self.model, self.session.families):
                runner = BlockRunner(block, family, getattr(block, family.method), self.session)
                self._patches.set(block, family.method, runner)
                self.runners.append(runner)
        eager, captures = self.model.forward, self.session.captures
        reason = foreign_forward(self.model, eager, self._known)
        if self.name.startswith("vae"):
            ladder = OomFallback(eager, captures, self._retry, self._without_graphs)
            forward = _ModelForward(eager, ladder, self)
        elif reason is None:
            forward = self._whole_forward(eager)
            self.captured = forward.captured
        else:
            self.foreign = reason
            self.captured = CapturedParts(eager, self._part_forwards(), reason)
            forward = _ModelForward(eager, self.captured, self)
        self._patches.set(self.model, "forward", forward)
        self._set_active(True)

    def _whole_forward(self, eager: Callable[..., Any]) -> _ModelForward:
        """The same one in each job: captures are given up when a model has got another one."""
        if self._whole is not None and self._whole.eager != eager:
            self._forget_whole()
        if self._whole is None:
            captured = CapturedForward(
                self.model, eager, self.runners, self.session.captures, self._known
            )
            self._whole = _ModelForward(eager, captured, self)
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
                captures, share = self.session.captures, 1 / len(parts)
                self._parts.append(
                    CapturedForward(part, part.forward, runners, captures, self._known, share)
                )
        for captured in self._parts:
            self._patches.set(captured.model, "forward", captured)
        return self._parts

    def remove(self) -> None:
        """Leave every attribute as it was before `install`, and drop the captures.

        The component that made way for this one serves the model again.
        """
        was_serving = _serving(self.model) is self
        self.suspend()
        above, below = self._leave_stack()
        heir = above or below
        if heir is None:
            self.layouts.restore()
        else:
            heir.layouts.take_over(self.layouts)
        if below is not None and was_serving:
            below.install()
        self._forget_parts()
        self._forget_whole()
        self.runners = []

    def _leave_stack(self) -> tuple[Component | None, Component | None]:
        """Returns who was above and below, now next to each other."""
        above, below = self._above(), self._below()
        if above is not None:
            above._below = self._below
        if below is not None:
            below._above = self._above
        self._above = self._below = _nobody
        return above, below

    def _forget_parts(self) -> None:
        for part in self._parts:
            part.forget()
        self._parts = []

    def suspend(self) -> None:
        """Leave every attribute as it was before `install`, and be ready to install again."""
        self._set_active(False)  # somebody may still hold a runner
        left = self._patches.undo()
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
        self.session.fell_back(self.name.replace("vae_", "VAE "), MEMORY_IS_SHORT)
        with self.paused():
            yield
        for runner in self.runners:
            runner.used, runner.eager_reason = None, MEMORY_IS_SHORT

    def _set_active(self, active: bool) -> None:
        ours: list[BlockRunner | CapturedForward | CapturedParts] = [*self.runners, *self._parts]
        if self.captured is not None:
            ours.append(self.captured)
        for each in ours:
            each.active = active

    def _put_back(self) -> bool:
        """Install the runners that were suspended; nothing is left of them when blocks or their
        forwards are others now."""
        blocks = _known_blocks(self.model, self.session.families)
        parked = [(runner.block, runner.family, runner.eager) for runner in self.runners]
        if [(block, family, getattr(block, family.method)) for block, family in blocks] != parked:
            self.remove()
            return False
        for runner in self.runners:
            self._patches.set(runner.block, runner.family.method, runner)
        return True

    def _retry(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Retry:
        return retry_of(Snapshot(self.model, self._known), args, kwargs)

    def kinds(self) -> list[BlockKind]:
        """The kinds that this component's blocks have used, each once."""
        blocks = {runner.block for runner in self.runners}
        return [kind for kind in self.session.kinds if not blocks.isdisjoint(kind.blocks)]


class _ModelForward:
    """A model's forward that builds what it found missing, after the result is there.

    A switch from eager to graphs therefore never falls into the middle of a forward.
    """

    def __init__(
        self, eager: Callable[..., Any], forward: Callable[..., Any], component: Component
    ) -> None:
        self.eager, self._forward, self._session = eager, forward, component.session
        # Others may hold this long after the component is removed, and call it.
        self._component = weakref.ref(component)
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

    @property
    def component(self) -> Component | None:
        """Whose it is, while that exists."""
        return self._component()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session, component = self._session, self._component()
        runners = [] if component is None else component.runners
        with (
            session.forward(),
            session.spot_checks.forward(runners),
            accumulation(session.precision),
        ):
            if component is not None:
                session.drew(component)
            output = self._forward(*args, **kwargs)
            session.contents.settle()
        self._session.after_forward()
        return output


def _nobody() -> None:
    return None


def _serving(model: nn.Module) -> Component | None:
    """The component whose forward the model has now."""
    forward = vars(model).get("forward")
    return forward.component if isinstance(forward, _ModelForward) else None


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
