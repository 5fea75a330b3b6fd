"""Warm-up: everything that some sizes need is made before anybody waits for it, and measured."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onediff_ext.core.shapes import BatchShape
from onediff_ext.core.words import counted
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.engine.machine import machine_digest
from onediff_ext.session.model_component import Component
from onediff_ext.session.session import Session

_POLL_S = 0.1
# New graphs are compared in the first forward of a size, the second is recorded and compared, and
# so is one more; the next is replayed. Where that never happens, no more are tried.
_MOST_FORWARDS = 5
# Steps of each kind that are measured: twice, since a slow moment of the machine hits one of them
# only, and more often where they are short.
_ROUNDS, _MEASURE_S, _MOST_ROUNDS = 2, 0.1, 5
# How long a host's queue is left to those who wait in it, before the next pass waits behind them.
_LET_PASS_S = 0.5
STAGES = ("kinds", "captures", "measuring")


@dataclass(frozen=True)
class WarmUpProgress:
    """How far a warm-up has come.

    Args:
        stage: One of `STAGES`.
        done, needed: Kinds in the first stage, sizes in the others.
        label: What it is at, or was last.
        seconds_left: Of this stage; None when unknown.
    """

    stage: str
    done: int
    needed: int
    label: str
    seconds_left: float | None


@dataclass(frozen=True)
class SizeFigures:
    """What was measured at one size.

    Args:
        shape: Size in pixels and pictures at once; CFG doubles the UNet's batch.
        first_s: The first step at this size, in seconds.
        eager_ms, compiled_ms: One step, the shortest of several.
    """

    shape: BatchShape
    first_s: float
    eager_ms: float
    compiled_ms: float

    @property
    def speedup(self) -> float:
        """How many times faster than eager."""
        return self.eager_ms / self.compiled_ms

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "size": str(self.shape),
            "first_s": self.first_s,
            "eager_ms": self.eager_ms,
            "compiled_ms": self.compiled_ms,
            "speedup": self.speedup,
        }


@dataclass
class WarmUpReport:
    """What a warm-up did.

    Args:
        sizes: What was measured, in the order of the sizes; fewer when it was cancelled.
        built, loaded: Kinds that got their graph by it or before it, in this process.
        eager: Kinds that stay eager.
        cancelled: Whether somebody ended it early.
        gave_way: Whether it ended early since somebody wanted a picture.
        seconds: In all.
    """

    sizes: list[SizeFigures] = field(default_factory=list)
    built: int = 0
    loaded: int = 0
    eager: int = 0
    cancelled: bool = False
    gave_way: bool = False
    seconds: float = 0.0

    def followed_by(self, later: WarmUpReport) -> WarmUpReport:
        """Of two passes over one list of sizes."""
        return replace(
            later,
            sizes=self.sizes + later.sizes,
            built=max(self.built, later.built),  # each counts what the process has
            loaded=max(self.loaded, later.loaded),
            eager=max(self.eager, later.eager),
            seconds=self.seconds + later.seconds,
        )

    @property
    def speedup(self) -> float | None:
        """Over all sizes, in the geometric mean; None when nothing was measured."""
        return statistics.geometric_mean(s.speedup for s in self.sizes) if self.sizes else None

    def line(self) -> str:
        """One line for people."""
        gain = "" if self.speedup is None else f", {self.speedup:.1f}x measured"
        stays = f", {self.eager} stay eager" if self.eager else ""
        ended = "cancelled: " if self.cancelled else "not finished: " if self.gave_way else ""
        done = f"{counted(self.built, 'graph')} built, {self.loaded} loaded"
        return (
            f"{ended}{counted(len(self.sizes), 'size')}, {done}"
            f"{stays} in {self.seconds:.1f} s{gain}"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "sizes": [figures.as_json() for figures in self.sizes],
            "built": self.built,
            "loaded": self.loaded,
            "eager": self.eager,
            "cancelled": self.cancelled,
            "seconds": self.seconds,
            "speedup": self.speedup,
            "line": self.line(),
        }


ProgressListener = Callable[[WarmUpProgress], None]


class WarmUp:
    """Kinds, then captures, then one measured step each of eager and compiled.

    `run` works on the calling thread, which must be one that may draw; `cancel` may be called
    from any other.

    Args:
        session: Owns the graphs.
        components: The models that `step` runs.
        step: One forward of the denoising model on noise at a size, with CFG, that changes
            nothing of what is drawn next. Its inputs come from the generator and are others each
            time, so that whatever a capture froze shows when it is compared.
        others: One small forward of each other model, whose kinds are wanted too.
        shapes: Sizes, with pictures at once.
        device: Where the models are.
        listen: Told how far it has come.
        give_way: Whether somebody waits for a picture; asked between steps, and while graphs are
            being built. The warm-up ends then, and builds go on in the background.
    """

    def __init__(
        self,
        session: Session,
        components: Sequence[Component],
        step: Callable[[BatchShape, torch.Generator], object],
        others: Callable[[], object],
        shapes: Sequence[BatchShape],
        device: torch.device,
        listen: ProgressListener | None = None,
        give_way: Callable[[], bool] = lambda: False,
    ) -> None:
        self._session, self._components = session, list(components)
        self._forward, self._others = step, others
        self._shapes, self._device = list(dict.fromkeys(shapes)), device
        self._listen, self._give_way = listen, give_way
        self._noise = torch.Generator().manual_seed(0)  # a host's own stay as they are
        self._first_s: dict[BatchShape, float] = {}
        self._cancelled = threading.Event()
        self._gave_way = False

    def cancel(self) -> None:
        """End after the step that runs now; what is built and measured stays."""
        self._cancelled.set()
        if self._session.stage == STAGES[0]:
            self._session.cancel_builds()

    def run(self) -> WarmUpReport:
        """Do it; nothing is raised for kinds that cannot be built, which stay eager."""
        start, report, session = time.monotonic(), WarmUpReport(), self._session
        try:
            if self._shapes:
                session.stage = STAGES[0]
                self._make_kinds()
                self._for_each_shape(STAGES[1], self._capture)
                self._for_each_shape(STAGES[2], lambda shape: self._measure(shape, report))
        finally:
            session.stage, session.sizes_done = "", (0, 0)
        kinds = session.current_kinds()
        report.built = sum(kind.source == "built" for kind in kinds)
        report.loaded = sum(kind.source == "loaded" for kind in kinds)
        report.eager = sum(kind.state is KindState.FAILED for kind in kinds)
        report.cancelled, report.gave_way = self._cancelled.is_set(), self._gave_way
        report.seconds = time.monotonic() - start
        session.record_checkpoint()
        return report

    def _stops(self) -> bool:
        self._gave_way = self._gave_way or self._give_way()
        return self._gave_way or self._cancelled.is_set()

    def _make_kinds(self) -> None:
        if self._stops():
            return
        session = self._session
        smallest = min(self._shapes, key=lambda s: s.width_px * s.height_px * s.batch)
        with session.holding_builds():
            self._everything(smallest)
        if session.options.build == "never" or self._cancelled.is_set():
            return
        session.build_in_background()
        while not self._stops():
            finished = session.wait_for_builds(_POLL_S)
            status = session.status()
            done = status.kinds_ready + status.kinds_failed
            label = ", ".join(status.building_now)
            self._tell(STAGES[0], done, status.kinds_needed, label, status.seconds_left)
            if finished:
                self._everything(smallest)  # compares what is new with eager
                return
        if self._cancelled.is_set():
            session.cancel_builds()

    def _everything(self, shape: BatchShape) -> None:
        self._others()
        self._step(shape)

    def _for_each_shape(self, stage: str, do: Callable[[BatchShape], None]) -> None:
        start = time.monotonic()
        for done, shape in enumerate(self._shapes):
            if self._stops():
                return
            self._session.stage = stage
            spent = time.monotonic() - start
            left = spent / done * (len(self._shapes) - done) if done else None
            self._tell(stage, done, len(self._shapes), str(shape), left)
            do(shape)
        if not self._stops():
            self._tell(stage, len(self._shapes), len(self._shapes), "", 0.0)

    def _capture(self, shape: BatchShape) -> None:
        if self._session.captures.unavailable_reason(self._device) is not None:
            return
        for _ in range(_MOST_FORWARDS):
            if self._stops():
                return
            seconds = self._timed(shape)
            self._first_s.setdefault(shape, seconds)
            if all(c.captured is None or c.captured.replayed for c in self._components):
                return

    def _measure(self, shape: BatchShape, report: WarmUpReport) -> None:
        first_s = self._first_s.get(shape) or self._timed(shape)
        if self._device.type == "cuda":
            with self._paused():
                self._step(shape)  # cuDNN's own choice of kernels is not what eager costs
        eager: list[float] = []
        compiled: list[float] = []
        until = time.monotonic() + _MEASURE_S
        while len(eager) < _ROUNDS or (time.monotonic() < until and len(eager) < _MOST_ROUNDS):
            for times, how in ((compiled, nullcontext()), (eager, self._paused())):
                if self._stops():
                    return
                with how:
                    times.append(self._timed(shape))
        figures = SizeFigures(shape, first_s, 1000 * min(eager), 1000 * min(compiled))
        report.sizes.append(figures)
        checkpoint = self._session.checkpoint
        self._session.builder.history.record_step(
            checkpoint="" if checkpoint is None else checkpoint.content_hash,
            machine=machine_digest(self._device),
            size=str(shape),
            eager_ms=figures.eager_ms,
            compiled_ms=figures.compiled_ms,
        )

    @contextmanager
    def _paused(self) -> Iterator[None]:
        with ExitStack() as paused:
            for component in self._components:
                paused.enter_context(component.paused())
            yield

    def _step(self, shape: BatchShape) -> None:
        self._forward(shape, self._noise)

    def _timed(self, shape: BatchShape) -> float:
        self._synchronize()
        start = time.perf_counter()
        self._step(shape)
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _tell(
        self, stage: str, done: int, needed: int, label: str, seconds_left: float | None
    ) -> None:
        if stage != STAGES[0]:
            self._session.sizes_done = (done, needed)
        if self._listen is not None:
            self._listen(WarmUpProgress(stage, done, needed, label, seconds_left))


class WarmUpControl:
    """Ends a warm-up from any thread, in whichever of its passes, or while it waits for one."""

    def __init__(self) -> None:
        self._running: WarmUp | None = None
        self.is_cancelled = False

    def start(self) -> None:
        """A warm-up begins, which nobody has cancelled yet."""
        self.is_cancelled = False

    def cancel(self) -> bool:
        """End it; returns whether a pass was running."""
        running, self.is_cancelled = self._running, True
        if running is not None:
            running.cancel()
        return running is not None

    def run(self, warm_up: WarmUp) -> WarmUpReport:
        """Run one pass."""
        self._running = warm_up
        try:
            if self.is_cancelled:
                warm_up.cancel()
            return warm_up.run()
        finally:
            self._running = None


def in_passes(
    shapes: Sequence[BatchShape],
    run: Callable[[list[BatchShape]], WarmUpReport | None],
    is_cancelled: Callable[[], bool],
) -> WarmUpReport | None:
    """Warm up in as many passes as there are pictures that others want meanwhile.

    Args:
        shapes: All sizes.
        run: Waits for its turn among the host's jobs and warms up the sizes that are left. Gives
            None when that cannot be.
        is_cancelled: Asked between passes.

    Returns:
        What all passes did; None when the first could do nothing.
    """
    total: WarmUpReport | None = None
    left = list(dict.fromkeys(shapes))
    while left:
        report = run(left)
        if report is None:
            break
        total = report if total is None else total.followed_by(report)
        if not report.gave_way:
            break
        measured = {figures.shape for figures in total.sizes}
        left = [shape for shape in left if shape not in measured]
        time.sleep(_LET_PASS_S)
        if is_cancelled():
            total.cancelled = True
            break
    return total
