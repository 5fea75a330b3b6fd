"""Warm-up: builds, captures and measures everything that some sizes need, before a picture does."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch

from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.engine.machine import machine_digest
from onediff_ext.session.model_component import Component
from onediff_ext.session.session import Session
from onediff_ext.session.warm_up_report import (
    STAGES,
    SizeFigures,
    WarmUpListener,
    WarmUpProgress,
    WarmUpReport,
)

_POLL_S = 0.1
# The first forward of a size compares new graphs, the second and third are recorded and compared,
# the fourth is a replay. Where that never happens, no more are tried.
_MOST_FORWARDS = 5
# Measured steps of each way: at least two, since a slow moment of the machine hits only one of
# them, and more where steps are short.
_ROUNDS, _MEASURE_S, _MOST_ROUNDS = 2, 0.1, 5


class WarmUp:
    """Builds kinds, records CUDA graphs, then measures a step of eager and compiled at each size.

    `run` works in the calling thread, which must be one that may draw. `cancel` may be called
    from any other thread.

    Args:
        session: Owns the graphs.
        components: The models that `step` runs.
        step: Runs one forward of the denoising model on noise at a size, with CFG. It must not
            change later pictures. The generator gives other inputs each time, so that a comparison
            finds whatever a CUDA graph has frozen.
        others: Runs one small forward of each other model.
        shapes: Sizes in pixels, with the number of pictures at once.
        device: The device of the models.
        listen: Called with the progress.
        give_way: Whether somebody waits for a picture; asked between steps and during builds. The
            warm-up ends then, and builds go on in the background.
        measured_before: Sizes that earlier passes have measured, for the progress.
        guided: Runs the forwards that guidance steps bring, as `step` does those with guidance;
            None where pictures have none. They are built and captured, and not measured.
    """

    def __init__(
        self,
        session: Session,
        components: Sequence[Component],
        step: Callable[[BatchShape, torch.Generator], object],
        others: Callable[[], object],
        shapes: Sequence[BatchShape],
        device: torch.device,
        listen: WarmUpListener | None = None,
        give_way: Callable[[], bool] = lambda: False,
        measured_before: int = 0,
        guided: Callable[[BatchShape, torch.Generator], object] | None = None,
    ) -> None:
        self._session, self._components = session, list(components)
        self._forward, self._others, self._guided = step, others, guided
        self._shapes, self._device = list(dict.fromkeys(shapes)), device
        self._listen, self._give_way = listen, give_way
        self._noise = torch.Generator().manual_seed(0)  # the host's own generators stay unchanged
        self._measured_before = measured_before
        self._first_s: dict[BatchShape, float] = {}
        self._cancelled = threading.Event()
        self._gave_way = False

    def cancel(self) -> None:
        """End after the present step. Finished graphs and measurements stay."""
        self._cancelled.set()
        if self._session.stage == STAGES[0]:
            self._session.cancel_builds()

    def run(self) -> WarmUpReport:
        """Run the warm-up. Kinds that cannot be built stay eager, and nothing is raised for them.

        Returns:
            What was done, also after `cancel` and `give_way`.
        """
        start, report, session = time.monotonic(), WarmUpReport(), self._session
        before = {kind for kind in session.kinds if kind.source == "built"}
        try:
            if self._shapes:
                session.stage = STAGES[0]
                self._show_sizes(0)
                with session.last_picture.warm_up():
                    self._make_kinds()
                    self._for_each_shape(STAGES[1], self._capture)
                    self._for_each_shape(STAGES[2], lambda shape: self._measure(shape, report))
        finally:
            session.stage, session.sizes_done = "", (0, 0)
        kinds = session.current_kinds()
        ready = [kind for kind in kinds if kind.graph is not None]
        report.built = sum(kind.source == "built" and kind not in before for kind in ready)
        report.loaded, report.built_before = len(ready) - report.built, len(before)
        why = Counter(kind.reason for kind in kinds if kind.state is KindState.FAILED)
        report.eager = why.total()
        report.why_eager = why.most_common(1)[0][0] if why else ""
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
        was_paused = False
        while not self._stops():
            finished = session.wait_for_builds(_POLL_S)
            if session.builds_are_paused:
                was_paused, finished = True, False
                time.sleep(_POLL_S)
            elif was_paused:
                # The end of a pause comes before its builds begin.
                was_paused = finished = False
                session.build_in_background()
            status = session.status()
            done = status.kinds_ready + status.kinds_failed
            label = ", ".join(status.building_now)
            self._tell(STAGES[0], done, status.kinds_needed, label, status.seconds_left)
            if finished:
                self._everything(smallest)  # compares new graphs with eager
                return
        if self._cancelled.is_set():
            session.cancel_builds()

    def _everything(self, shape: BatchShape) -> None:
        self._others()
        self._step(shape)
        if self._guided is not None:
            self._guided(shape, self._noise)

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
        if self._session.cuda_graphs.unavailable_reason(self._device) is not None:
            return

        def step() -> None:
            seconds = self._timed(shape)
            self._first_s.setdefault(shape, seconds)

        self._repeat_until_replayed(step)
        if self._guided is not None:
            self._repeat_until_replayed(partial(self._guided, shape, self._noise))

    def _repeat_until_replayed(self, run: Callable[[], object]) -> None:
        for _ in range(_MOST_FORWARDS):
            if self._stops():
                return
            run()
            if all(c.captured is None or c.captured.replayed for c in self._components):
                return

    def _measure(self, shape: BatchShape, report: WarmUpReport) -> None:
        first_s = self._first_s.get(shape) or self._timed(shape)
        if self._device.type == "cuda":
            with self._paused():
                self._step(shape)  # leaves cuDNN's search for kernels out of the figures
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
        self._session.build_context.history.record_step(
            checkpoint="" if checkpoint is None else checkpoint.content_hash,
            machine=machine_digest(self._device),
            backend=self._session.backend.name,
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

    def _show_sizes(self, done: int) -> None:
        before = self._measured_before
        self._session.sizes_done = (before + done, before + len(self._shapes))

    def _tell(
        self, stage: str, done: int, needed: int, label: str, seconds_left: float | None
    ) -> None:
        if stage != STAGES[0]:
            self._show_sizes(done)
        if self._listen is not None:
            self._listen(WarmUpProgress(stage, done, needed, label, seconds_left))
