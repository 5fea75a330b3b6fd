"""A component: one model of a host (UNet, transformer, VAE decoder) whose blocks run graphs."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from onediff_ext.building.picture_clock import ModelCall
from onediff_ext.core.components import ComponentId
from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.engine.blocks.family import BlockFamily
from onediff_ext.engine.cuda_graphs.captured_forward import CapturedForward
from onediff_ext.engine.cuda_graphs.captured_parts import CapturedParts, parts_of
from onediff_ext.engine.cuda_graphs.oom_fallback import OomFallback, Retry, retry_of
from onediff_ext.engine.cuda_graphs.staleness import Snapshot, TrustedModules, foreign_forward
from onediff_ext.engine.patches import Patches
from onediff_ext.engine.running.block_runner import BlockRunner
from onediff_ext.engine.running.fp16_accumulation import accumulation
from onediff_ext.session.foreign_blocks import ForeignBlocks
from onediff_ext.session.session import Session
from onediff_ext.session.weight_layouts import WeightLayouts

logger = logging.getLogger(__name__)

MEMORY_IS_SHORT = "memory is short"


class Component:
    """Puts a runner into each known block of a model, reversibly.

    Args:
        identity: Its role, and its number where several share the role.
        model: The host's module; its own forward keeps running in Python.
        session: Owns the kinds.
        channels_last: Change convolution weights to channels last, if the session's options say so.

    Attributes:
        identity, session: As given.
        role: Of `identity`.
        name: `identity` as text.
        runners: One for each block.
        captured: The model's forward as a CUDA graph, or its parts as several, while installed.
            None for a VAE: it runs once for a picture, and at large sizes it needs all free memory.
        layouts: The changed memory layouts of the weights.
        foreign: Why the model's forward belongs to another extension, which calls the blocks from
            there; None when it is the model's own, or nothing is installed.
        foreign_blocks: What other extensions did to its blocks.
    """

    def __init__(
        self,
        identity: ComponentId,
        model: nn.Module,
        session: Session,
        channels_last: bool = False,
    ) -> None:
        self.identity, self.model, self.session = identity, model, session
        self.role, self.name = identity.role, str(identity)
        families = session.families
        self._known = TrustedModules(
            sorted({source for family in families for source in family.sources}),
            session.rules,
            sorted({patcher for family in families for patcher in family.trusted_patchers}),
            frozenset().union(*(family.ignored_attrs for family in families)),
            sorted({name for family in families for name in family.dynamic_weight_attrs}),
            frozenset(name for family in families for name in family.per_image),
            [family.global_settings for family in families],
            session.code,
        )
        self._patches = Patches()
        self.runners: list[BlockRunner] = []
        self.captured: CapturedForward | CapturedParts | None = None
        self.foreign: str | None = None
        self.foreign_blocks = ForeignBlocks()
        self._channels_last, self.layouts = channels_last, WeightLayouts()
        # Components of the same model: the one installed over this one, and the one below it.
        self._above: Callable[[], Component | None] = _nobody
        self._below: Callable[[], Component | None] = _nobody
        self._whole: _ModelForward | None = None
        self._parts: list[CapturedForward] = []

    def install(self) -> None:
        """Replace the forwards of the model's known blocks and of the model itself.

        After `suspend`, the same runners and CUDA graphs go on, if the model is still the same.
        Another component of the model is suspended until this one is removed: a graph must be
        compared with the model's own forward, and not with another graph.
        """
        other = _serving(self.model)
        if other is not None and other is not self:
            self._leave_stack()
            other.suspend()
            self._below, other._above = weakref.ref(other), weakref.ref(self)
        if self.session.options.channels_last and self._channels_last:
            self.layouts.use_channels_last(self.model)
        if not (self.runners and self._put_back()):
            for block, family in known_blocks(self.model, self.session.families):
                runner = BlockRunner(block, family, getattr(block, family.method), self.session)
                self._patches.set(block, family.method, runner)
                self.runners.append(runner)
        self.foreign_blocks.find_replaced(self.model, self.session.families)
        if not self.runners:
            self.foreign_blocks.note_unknown(self.model)
        eager, cuda_graphs = self.model.forward, self.session.cuda_graphs
        reason = foreign_forward(self.model, eager, self._known)
        if self.role.is_vae:
            fallback = OomFallback(eager, cuda_graphs, self._retry, self._without_graphs)
            forward = _ModelForward(eager, fallback, self)
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
        """The model's captured forward, kept between jobs while its own forward stays the same."""
        if self._whole is not None and self._whole.eager != eager:
            self._forget_whole()
        if self._whole is None:
            captured = CapturedForward(
                self.model, eager, self.runners, self.session.cuda_graphs, self._known
            )
            self._whole = _ModelForward(eager, captured, self)
        return self._whole

    def _forget_whole(self) -> None:
        if self._whole is not None and self._whole.captured is not None:
            self._whole.captured.forget()
        self._whole = None

    def _part_forwards(self) -> list[CapturedForward]:
        """Capture the model's parts, with the same CUDA graphs in the next job."""
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
                cuda_graphs, share = self.session.cuda_graphs, 1 / len(parts)
                self._parts.append(
                    CapturedForward(part, part.forward, runners, cuda_graphs, self._known, share)
                )
        for captured in self._parts:
            self._patches.set(captured.model, "forward", captured)
        return self._parts

    def remove(self) -> None:
        """Restore every attribute to its value before `install`, and drop the CUDA graphs.

        The component that was suspended for this one serves the model again.
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
        """Link the components above and below with each other, and return them."""
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
        """Restore every attribute to its value before `install`, and keep the runners for later."""
        self._set_active(False)  # a host may still hold a runner
        left = self._patches.undo()
        # A foreign forward may keep models alive that nothing else uses.
        self.captured = self.foreign = None
        if left:
            logger.warning(
                "%s: another extension has replaced %s since; ours only passes calls on now",
                self.name,
                ", ".join(left),
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the model's own blocks within the ``with`` block."""
        self._set_active(False)
        try:
            yield
        finally:
            self._set_active(True)

    @contextmanager
    def _without_graphs(self) -> Iterator[None]:
        """`paused`, told."""
        self.session.fell_back(self.role.label, MEMORY_IS_SHORT)
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
        """Install the suspended runners again.

        Returns:
            False when blocks or their forwards have changed; the runners are removed then.
        """
        blocks = known_blocks(self.model, self.session.families)
        parked = [(runner.block, runner.family, runner.eager) for runner in self.runners]
        if [(block, family, getattr(block, family.method)) for block, family in blocks] != parked:
            self.remove()
            return False
        for runner in self.runners:
            self._patches.set(runner.block, runner.family.method, runner)
        return True

    def _retry(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Retry:
        return retry_of(Snapshot(self.model, self._known), args, kwargs)

    def call_of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> ModelCall:
        """Return what one call of the model shows of its picture."""
        return ModelCall.of(self.identity, self.model, args, kwargs)

    def kinds(self) -> list[BlockKind]:
        """The kinds that this component's blocks have used, each once."""
        blocks = {runner.block for runner in self.runners}
        return [kind for kind in self.session.kinds if not blocks.isdisjoint(kind.blocks)]


class _ModelForward:
    """A model's forward that builds missing graphs after its result is computed.

    So a forward never switches from eager to graphs halfway.

    Args:
        eager: The model's own forward.
        forward: Computes the result.
        component: The model's component.
    """

    def __init__(
        self, eager: Callable[..., Any], forward: Callable[..., Any], component: Component
    ) -> None:
        self.eager, self._forward, self._session = eager, forward, component.session
        # Hosts may keep this after the component is removed, and call it.
        self._component = weakref.ref(component)
        self.captured = forward if isinstance(forward, CapturedForward) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.eager, memo)

    @property
    def variant(self) -> Hashable:
        """See `CapturedForward`."""
        return None if self.captured is None else self.captured.variant

    @variant.setter
    def variant(self, value: Hashable) -> None:
        if self.captured is not None:
            self.captured.variant = value

    @property
    def keeps(self) -> object:
        """See `CapturedForward`."""
        return None if self.captured is None else self.captured.keeps

    @keeps.setter
    def keeps(self, value: object) -> None:
        if self.captured is not None:
            self.captured.keeps = value

    @property
    def component(self) -> Component | None:
        """The component, while it exists."""
        return self._component()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session, component = self._session, self._component()
        runners = [] if component is None else component.runners
        call = None if component is None else component.call_of(args, kwargs)
        with (
            session.forward(call),
            session.spot_checks.forward(runners),
            accumulation(session.precision),
        ):
            first = component if component is not None and session.drew(component) else None
            if first is not None:
                first.foreign_blocks.before_picture(runners)
            output = self._timed(component, args, kwargs)
            session.contents.settle()
        if first is not None:
            replayed = first.captured is not None and first.captured.replayed
            first.foreign_blocks.after_first_forward(runners, replayed=replayed)
        self._session.after_forward()
        return output

    def _timed(
        self, component: Component | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward; a denoiser's time counts for the estimate of what graphs save."""
        if component is None or not component.role.is_denoiser:
            return self._forward(*args, **kwargs)
        with self._session.timer.forward((*args, *kwargs.values())):
            return self._forward(*args, **kwargs)


def _nobody() -> None:
    return None


def _serving(model: nn.Module) -> Component | None:
    """The component that has replaced the model's forward, or None."""
    forward = vars(model).get("forward")
    return forward.component if isinstance(forward, _ModelForward) else None


def known_blocks(
    model: nn.Module, families: Sequence[BlockFamily]
) -> list[tuple[nn.Module, BlockFamily]]:
    """Return the outermost blocks of known classes. The modules inside a block belong to its graph.

    A family for only some parts of a block leaves the other parts to other families.
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
