"""Builds graphs again with more effort while the machine is idle, and keeps the faster ones."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from onediff_ext.building.build_context import BuildContext
from onediff_ext.building.build_folder import BuildFolder, safe_parent
from onediff_ext.building.exporting import export_all
from onediff_ext.building.worker_counts import has_room_to_measure
from onediff_ext.building.worker_process import Tuned, WorkerProcess
from onediff_ext.core.errors import BackendError, MachineError, OneDiffError
from onediff_ext.core.forks import forgets_threads, fork_safe_lock
from onediff_ext.core.power import are_processors_idle, is_on_battery
from onediff_ext.engine.blocks.block_kind import BlockKind, KindState
from onediff_ext.engine.machine import machine_digest
from onediff_ext.store import StoreBusyError, Tuning

logger = logging.getLogger(__name__)

# The machine counts as idle after so long without a picture or a build.
IDLE_S = 60.0
# What is not faster by this much may be an error of the measurement.
LEAST_GAIN = 0.02
# So much slower may a graph be for small pictures that is faster for large ones.
MOST_LOSS = 0.01
TuningListener = Callable[[str, int], object]
_LOOK_S = 1.0
_GIVE_WAY_S = 0.05


class IdleTuning:
    """Tunes one graph after the other in a thread, which lives as long as there is something to do.

    A tuned graph takes the place of the stored one. It is used from a picture on that begins when
    all are done, and is compared with eager there. A picture that begins earlier ends the worker
    at once.

    Args:
        context: The stored graphs, and what is known of builds.
        kinds: Returns the kinds of the last pictures.
        is_building: Whether missing graphs are being built, which goes first.
    """

    def __init__(
        self,
        context: BuildContext,
        kinds: Callable[[], Sequence[BlockKind]],
        is_building: Callable[[], bool],
    ) -> None:
        self._context, self._kinds, self._is_building = context, kinds, is_building
        self._lock = fork_safe_lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._known: dict[str, Tuning | None] = {}  # by digest of the kind's key
        self._tuned: list[BlockKind] = []  # stored, and not in use yet
        self.kinds_done, self.kinds_wanted = 0, 0
        forgets_threads(self)

    def forget_other_threads(self) -> None:
        """Nothing is tuned in this forked process."""
        is_over, self._closed = self._closed.is_set(), threading.Event()
        if is_over:
            self._closed.set()
        self._thread = None
        self.kinds_done = self.kinds_wanted = 0

    @property
    def is_tuning(self) -> bool:
        """Whether graphs are being tuned now."""
        return self.kinds_wanted > 0

    def start(self) -> None:
        """Wait for idle time and tune, unless that is switched off or there is nothing to tune."""
        options = self._context.options
        if options.tuning == "off" or not self._context.may_build or self._closed.is_set():
            return
        with self._lock:
            if self._thread is not None or not self._to_tune():
                return
            thread = threading.Thread(target=self._work, name="onediff-tuning", daemon=True)
            with contextlib.suppress(RuntimeError):  # no room for a thread
                thread.start()
                self._thread = thread

    def tune_now(self, listen: TuningListener) -> int:
        """Tune in the calling thread, as long as it takes, whether or not that is switched off.

        Nobody should draw meanwhile: graphs are measured.

        Args:
            listen: Called after each kind, with its label and the number of kinds.

        Returns:
            How many graphs are in use from now on that are faster than before.

        Raises:
            BackendError: There is no safe folder to build in.
        """
        kinds = self._to_tune()
        with self._worker(in_background=False) as worker:
            for kind in kinds:
                self._tune(kind, worker, threading.Event())
                listen(kind.label, len(kinds))
        faster = len(self._tuned)
        self._use_tuned(threading.Event())
        return faster

    def close(self) -> None:
        """End what is being tuned at once, for good."""
        self._closed.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5.0)

    def gain(self, kinds: Sequence[BlockKind]) -> float | None:
        """How much faster tuning has made the blocks of some kinds.

        Args:
            kinds: Weighted by their calls.

        Returns:
            0.04 for 4%, by what was measured for large pictures; None when none of them is faster.
        """
        before_ms = after_ms = 0.0
        for kind in kinds:
            tuning = self._tuning_of(kind)
            if tuning is not None and kind.graph is not None:
                before_ms += kind.calls * tuning.before_ms
                after_ms += kind.calls * tuning.after_ms
        return before_ms / after_ms - 1 if before_ms > after_ms > 0 else None

    def _to_tune(self) -> list[BlockKind]:
        """The kinds that are worth an attempt, the one that costs most time first."""
        device_settings = self._context.backend.tuning
        kinds = []
        for kind in self._kinds():
            settings = device_settings(kind.device)
            tuning = self._tuning_of(kind)
            is_done = tuning is not None and tuning.settings == settings
            if settings is not None and kind.state is KindState.READY and not is_done:
                kinds.append(kind)
        return sorted(kinds, key=lambda kind: -kind.weight)

    def _tuning_of(self, kind: BlockKind) -> Tuning | None:
        digest = kind.key.digest
        if digest not in self._known:
            record = self._context.build_records.read(digest)
            self._known[digest] = record.tunings.get(machine_digest(kind.device))
        return self._known[digest]

    def _work(self) -> None:
        try:
            while not self._closed.is_set() and (self._to_tune() or self._tuned):
                if self._wait_until_idle():
                    self._tune_while_idle()
        except OneDiffError as exc:
            self._context.event_log.note("not tuned", "all graphs", exc.message)
        except Exception:  # a thread's errors would be lost; pictures go on
            logger.exception("Tuning ended")
        finally:
            with self._lock:
                self._thread = None

    def _wait_until_idle(self) -> bool:
        """Return whether there was a while without pictures and builds; False after `close`."""
        moment, since = self._moment(), time.monotonic()
        while not self._closed.wait(_LOOK_S):
            if self._is_disturbed(moment) or is_on_battery() or not are_processors_idle():
                moment, since = self._moment(), time.monotonic()
            elif time.monotonic() - since >= IDLE_S:
                return True
        return False

    def _moment(self) -> tuple[int, int]:
        foreground = self._context.foreground
        return foreground.epoch, foreground.pictures_begun

    def _is_disturbed(self, moment: tuple[int, int]) -> bool:
        return (
            self._moment() != moment or self._context.foreground.is_drawing or self._is_building()
        )

    def _tune_while_idle(self) -> None:
        kinds, moment = self._to_tune(), self._moment()
        with self._worker(in_background=True) as worker, self._giving_way(worker, moment) as stop:
            self.kinds_done, self.kinds_wanted = 0, len(kinds)
            try:
                for kind in kinds:
                    if stop.is_set():
                        return
                    if has_room_to_measure(kind.device):
                        self._tune(kind, worker, stop)
                    self.kinds_done += 1
                self._use_tuned(stop)
            finally:
                self.kinds_done = self.kinds_wanted = 0

    @contextlib.contextmanager
    def _worker(self, *, in_background: bool) -> Iterator[WorkerProcess]:
        folder = BuildFolder(safe_parent(self._context.library.folder))
        worker = self._context.new_worker(folder.path, in_background)
        try:
            yield worker
        finally:
            worker.close()
            folder.remove()

    @contextlib.contextmanager
    def _giving_way(
        self, worker: WorkerProcess, moment: tuple[int, int]
    ) -> Iterator[threading.Event]:
        """Yield an event that is set when a picture begins, after which the worker is ended."""
        stop, is_over = threading.Event(), threading.Event()

        def watch() -> None:
            while not is_over.wait(_GIVE_WAY_S):
                if self._closed.is_set() or self._is_disturbed(moment) or is_on_battery():
                    stop.set()
                    worker.close()
                    return

        watcher = threading.Thread(target=watch, name="onediff-gives-way", daemon=True)
        watcher.start()
        try:
            yield stop
        finally:
            is_over.set()
            watcher.join()

    def _tune(self, kind: BlockKind, worker: WorkerProcess, stop: threading.Event) -> None:
        """Tune one kind, unless another process is at it, has done it, or is drawing."""
        context = self._context
        try:
            with context.build_lock(kind, timeout_s=0):
                self._known.pop(kind.key.digest, None)  # another process may have been faster
                stored = context.graph_trust.usable_graph(kind)
                if kind not in self._to_tune():
                    if _is_faster(self._tuning_of(kind)):
                        self._tuned.append(kind)
                    return
                if stored is None or not context.graph_trust.is_load_safe(stored, kind):
                    raise MachineError("Its graph is not in the store.")
                context.event_log.note("tune", kind.label, "the machine is idle")
                program = self._export(kind, stop)
                if program is not None:
                    self._judge(kind, self._build(kind, worker, stored.payload or b"", program))
        except StoreBusyError:
            return
        except OneDiffError as exc:
            if not stop.is_set():
                self._fail(kind, exc)

    def _fail(self, kind: BlockKind, exc: OneDiffError) -> None:
        """Do not try a kind again: in this process, and in others if its graph is at fault."""
        tuning = Tuning(self._settings(kind), 0.0, 0.0, exc.message, time.time())
        self._known[kind.key.digest] = tuning
        if type(exc) is BackendError:
            self._record(kind, tuning)
        self._context.event_log.note("not tuned", kind.label, exc.message)

    def _export(self, kind: BlockKind, stop: threading.Event) -> bytes | None:
        context = self._context
        for result in export_all(
            [kind], context.foreground, stop, share=context.share, children=context.export_children
        ):
            if result.error is not None:
                raise result.error
            return result.program
        return None

    def _build(
        self, kind: BlockKind, worker: WorkerProcess, payload: bytes, program: bytes
    ) -> Tuned:
        timeout_s = self._context.options.build_timeout_s
        return worker.tune(payload, program, str(kind.device), timeout_s)

    def _judge(self, kind: BlockKind, tuned: Tuned) -> None:
        """Keep the tuned graph if it is faster, and record what was measured."""
        context = self._context
        before_ms, after_ms = tuned.before_ms[0], tuned.after_ms[0]
        times = zip(tuned.before_ms, tuned.after_ms, strict=True)
        gain, *gains = (before / after - 1 for before, after in times)
        is_faster = gain >= LEAST_GAIN and all(other >= -MOST_LOSS for other in gains)
        if is_faster and not context.outcomes.store_graph(kind, tuned.payload, tuned.seconds):
            raise MachineError("The store cannot be written.")
        after_ms = after_ms if is_faster else before_ms
        self._record(kind, Tuning(self._settings(kind), before_ms, after_ms, "", time.time()))
        if is_faster:
            self._tuned.append(kind)
        what = f"{tuned.before_ms[0]:.3f} ms a call before, {tuned.after_ms[0]:.3f} ms tuned"
        context.event_log.note("tuned" if is_faster else "not tuned", kind.label, what)

    def _settings(self, kind: BlockKind) -> str:
        return self._context.backend.tuning(kind.device) or ""

    def _record(self, kind: BlockKind, tuning: Tuning) -> None:
        self._known[kind.key.digest] = tuning
        self._context.build_records.record_tuning(
            kind.key.digest, kind.label, machine=machine_digest(kind.device), tuning=tuning
        )

    def _use_tuned(self, stop: threading.Event) -> None:
        """Load what was tuned, and use all of it from the next picture on."""
        loader, trust = self._context.graph_loader, self._context.graph_trust
        while self._tuned:
            kind = self._tuned[-1]
            stored = trust.usable_graph(kind)
            if kind.state is KindState.READY and stored is not None and stored.payload is not None:
                try:
                    if not loader.take(
                        kind, stored.payload, "loaded", in_background=True, stop=stop
                    ):
                        break
                except BackendError as exc:
                    problem = f"cannot be loaded: {exc.message}"
                    trust.refuse(kind, stored.header.payload_sha256, problem)
            self._tuned.pop()
        loader.use_ready()


def _is_faster(tuning: Tuning | None) -> bool:
    return tuning is not None and tuning.after_ms < tuning.before_ms
