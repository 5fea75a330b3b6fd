"""A component: one model of a host (UNet, transformer, VAE decoder) whose blocks run graphs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from onediff_ext.building.picture_clock import ModelCall
from onediff_ext.core.components import ComponentId
from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.engine.blocks.family import BlockFamily
from onediff_ext.engine.class_methods import forward_of, forward_slot, inner_forward_of
from onediff_ext.engine.cuda_graphs.cache import CapturedGraph
from onediff_ext.engine.cuda_graphs.captured_forward import CapturedForward
from onediff_ext.engine.cuda_graphs.captured_parts import CapturedParts, parts_of
from onediff_ext.engine.cuda_graphs.oom_fallback import OomFallback, Retry, retry_of
from onediff_ext.engine.cuda_graphs.staleness import Snapshot, foreign_forward
from onediff_ext.engine.cuda_graphs.trusted_modules import TrustedModules
from onediff_ext.engine.forward_variants import variant_of
from onediff_ext.engine.patches import Patches
from onediff_ext.engine.prompt_work import PromptWork
from onediff_ext.engine.running.block_runner import BlockRunner
from onediff_ext.engine.validity.surroundings import Surroundings
from onediff_ext.session.foreign_blocks import ForeignBlocks
from onediff_ext.session.model_forward import ModelForward, serving
from onediff_ext.session.session import Session
from onediff_ext.session.weight_layouts import WeightLayouts

if TYPE_CHECKING:
    from onediff_ext.session.cfg_parallel import CfgParallel

logger = logging.getLogger(__name__)

MEMORY_IS_SHORT = "memory is short"


class Component:
    """Puts a runner into each known block of a model, reversibly.

    Args:
        identity: Its role, and its number where several share the role.
        model: The host's module; its own forward keeps running in Python.
        session: Owns the kinds.
        channels_last: Change convolution weights to channels last, if the session's options say so.
        is_private: As for `ModelTracker`.

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
        known: What the modules of its model may be.
        cfg_parallel: Runs half of each batch on another device; None for one device.
    """

    def __init__(
        self,
        identity: ComponentId,
        model: nn.Module,
        session: Session,
        channels_last: bool = False,
        is_private: bool = False,
    ) -> None:
        self.identity, self.model, self.session = identity, model, session
        self.role, self.name = identity.role, str(identity)
        self.known = TrustedModules.of(session.families, session.rules, session.code)
        self._patches = Patches()
        self.runners: list[BlockRunner] = []
        self.captured: CapturedForward | CapturedParts | None = None
        self.foreign: str | None = None
        self.foreign_blocks = ForeignBlocks()
        self.cfg_parallel: CfgParallel | None = None
        self._channels_last, self.layouts = channels_last, WeightLayouts()
        self._is_private = is_private
        # Components of the same model: the one installed over this one, and the one below it.
        self._above: Callable[[], Component | None] = _nobody
        self._below: Callable[[], Component | None] = _nobody
        self._forward: ModelForward | None = None
        self._whole: CapturedForward | None = None
        self._parts: list[CapturedForward] = []
        self._part_patches = Patches()
        self._judged_class: type[nn.Module] | None = None
        self._judged_forward: object = None
        self._active = False

    def install(self) -> None:
        """Replace the forwards of the model's known blocks and of the model itself.

        After `suspend`, the same runners and CUDA graphs go on, if the model is still the same.
        Another component of the model is suspended until this one is removed: a graph must be
        compared with the model's own forward, and not with another graph.
        """
        other = serving(self.model)
        if other is not None and other is not self:
            self._leave_stack()
            other.suspend()
            self._below, other._above = weakref.ref(other), weakref.ref(self)
        if self.session.options.channels_last and self._channels_last:
            self.layouts.use_channels_last(self.model)
        if not (self.runners and self._put_back()):
            around = Surroundings(self.model, self.known.names_and_patchers, self.session.code)
            for block, family in known_blocks(self.model, self.session.families):
                forward_now = getattr(block, family.method)
                runner = BlockRunner(block, family, forward_now, self.session, around)
                self._patches.set(block, family.method, runner)
                self.runners.append(runner)
        self.foreign_blocks.find_replaced(self.model, self.session.families)
        if not self.runners:
            self.foreign_blocks.note_unknown(self.model)
        forward = self._forward = ModelForward(inner_forward_of(self.model), self)
        forward.prompt_work = self._prompt_work()
        self._patches.set(self.model, forward_slot(self.model), forward)
        self._active = True
        if self.role.is_vae:
            fallback = OomFallback(
                forward.eager, self.session.cuda_graphs, self._retry, self._without_graphs
            )
            forward.use(fallback)
            self._set_active(True)
        else:
            self._capture(forward)

    def _prompt_work(self) -> PromptWork | None:
        """Return what does the prompt's part of the forward ahead of it, or None."""
        families = {type(runner.family): runner.family for runner in self.runners}.values()
        recipes = (family.prompt_recipe(self.model) for family in families)
        recipe = next(filter(None, recipes), None)
        if recipe is None:
            return None
        return PromptWork(self.model, recipe, self.runners, self.known)

    def follow_class(self) -> None:
        """Judge the model's forward again if its class, or its class's forward, is another now."""
        cls = type(self.model)
        if self.captured is None or self._forward is None:
            return
        if cls is not self._judged_class or cls.forward is not self._judged_forward:
            self._capture(self._forward)

    def _capture(self, forward: ModelForward) -> None:
        """Have the model's forward recorded as a whole, or its parts where it is foreign.

        The whole is kept between jobs while the model's own forward stays the same.
        """
        cls = type(self.model)
        self._judged_class, self._judged_forward = cls, cls.forward
        reason = foreign_forward(self.model, forward.eager, self.known)
        if self.captured is not None and reason == self.foreign:
            return
        self._part_patches.undo()
        self.foreign = reason
        if reason is None:
            if self._whole is not None and not self._whole.goes_on_with(forward.eager):
                self._forget_whole()
            if self._whole is None:
                self._whole = CapturedForward(
                    self.model,
                    forward.eager,
                    self.runners,
                    self.session.cuda_graphs,
                    self.known,
                    without_graphs=self._without_graphs,
                    is_private=self._is_private,
                )
            self.captured = self._whole
        else:
            self.captured = CapturedParts(forward.eager, self._part_forwards(), reason)
        forward.use(self.captured)
        self._set_active(self._active)

    def show_class(self) -> None:
        """Show Dynamo the methods that the classes of the model and its blocks have now."""
        for runner in self.runners:
            runner.show_class()
        if self._forward is not None:
            self._forward.show_class()

    def _forget_whole(self) -> None:
        if self._whole is not None:
            self._whole.forget()
        self._whole = None

    def _part_forwards(self) -> list[CapturedForward]:
        """Capture the model's parts, with the same CUDA graphs in the next job."""
        if not all(part.goes_on_with(forward_of(part.model)) for part in self._parts):
            self._forget_parts()
        if not self._parts:
            parts = [
                part
                for part in parts_of(self.model, [runner.block for runner in self.runners])
                if foreign_forward(part, forward_of(part), self.known) is None
            ]
            for part in parts:
                inside = set(part.modules())
                runners = [runner for runner in self.runners if runner.block in inside]
                eager, cuda_graphs = forward_of(part), self.session.cuda_graphs
                self._parts.append(
                    CapturedForward(
                        part,
                        eager,
                        runners,
                        cuda_graphs,
                        self.known,
                        1 / len(parts),
                        self._without_graphs,
                    )
                )
        for captured in self._parts:
            self._part_patches.set(captured.model, "forward", captured)
        return self._parts

    def remove(self) -> None:
        """Restore every attribute to its value before `install`, and drop the CUDA graphs.

        The component that was suspended for this one serves the model again.
        """
        was_serving = serving(self.model) is self
        if self.cfg_parallel is not None:
            self.cfg_parallel.remove()
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
        if self._forward is not None and self._forward.prompt_work is not None:
            self._forward.prompt_work.remove()
        left = [*self._part_patches.undo(), *self._patches.undo()]
        # A foreign forward may keep models alive that nothing else uses.
        self.captured = self.foreign = self._forward = None
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
        """`paused`, told. Merged weights and 8-bit copies are freed, which only graphs read."""
        self.session.fell_back(self.role.label, MEMORY_IS_SHORT)
        if self.session.budget.release_derived():
            self.session.budget.release_cached()
        with self.paused():
            yield
        for runner in self.runners:
            runner.used, runner.eager_reason = None, MEMORY_IS_SHORT

    def _set_active(self, active: bool) -> None:
        self._active = active
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
            runner.follow_class()
            self._patches.set(runner.block, runner.family.method, runner)
        return True

    def compute(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward on its own device, while installed.

        Args:
            args, kwargs: Of the call.

        Returns:
            The output of the forward.
        """
        assert self._forward is not None
        return self._forward.compute(args, kwargs)

    def forget_cuda_graphs(self) -> None:
        """Drop them; calls record new ones."""
        if self._whole is not None:
            self._whole.forget()

    @property
    def replayed_from(self) -> CapturedGraph | None:
        """As `CapturedForward.replayed_from`."""
        captured = self.captured
        return captured.replayed_from if isinstance(captured, CapturedForward) else None

    @property
    def keeps_features(self) -> bool:
        """Whether DeepCache takes part in the present forward."""
        return variant_of(self.model) is not None

    def _retry(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Retry:
        return retry_of(Snapshot(self.model, self.known), args, kwargs)

    def call_of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> ModelCall:
        """Return what one call of the model shows of its picture.

        Args:
            args, kwargs: Of the call.
        """
        return ModelCall.of(self.identity, self.model, args, kwargs)

    def kinds(self) -> list[BlockKind]:
        """Return the kinds that this component's blocks have used, each once."""
        blocks = {runner.block for runner in self.runners}
        return [kind for kind in self.session.kinds if not blocks.isdisjoint(kind.blocks)]


def _nobody() -> None:
    return None


def known_blocks(
    model: nn.Module, families: Sequence[BlockFamily]
) -> list[tuple[nn.Module, BlockFamily]]:
    """Return the outermost blocks of known classes. The modules inside a block belong to its graph.

    A family for only some parts of a block leaves the other parts to other families.

    Args:
        model: The model; only the modules inside it are looked at.
        families: The known classes of blocks.
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
