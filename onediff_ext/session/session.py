"""The one owner of state: the kinds of this process, their graphs, and what happened to them."""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from onediff_ext.backends.registry import choose_backend
from onediff_ext.building.background_builds import BackgroundBuilds
from onediff_ext.building.build_folder import remove_stale
from onediff_ext.building.builder import Builder, ProgressListener
from onediff_ext.building.event_log import EventLog
from onediff_ext.building.foreground_scheduler import ForegroundScheduler
from onediff_ext.building.read_ahead import ReadAhead
from onediff_ext.core.errors import BackendError
from onediff_ext.core.kind_key import KindKey
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.status import Status
from onediff_ext.engine.blocks.block_kind import BlockKind, KindState
from onediff_ext.engine.blocks.family import BlockFamily
from onediff_ext.engine.blocks.kind_registry import KindRegistry
from onediff_ext.engine.blocks.weight_slots import WrapperRule
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.cuda_graphs.recorder import CudaRecorder
from onediff_ext.engine.machine import machine_entries
from onediff_ext.engine.torch_versions import keep_device_guard
from onediff_ext.session.checkpoint_use import CheckpointUse
from onediff_ext.session.incident_reports import write_incident
from onediff_ext.session.last_picture import Drawn, Fallback, Fallbacks, LastPicture
from onediff_ext.session.status import session_status
from onediff_ext.store import GraphLibrary, default_root

logger = logging.getLogger(__name__)

# Raised whenever the way from a block to its program changes, since old graphs are then
# those of another function.
ENGINE_SCHEMA = "1"
_ANY_EPOCH = sys.maxsize


class Session(KindRegistry):
    """Kinds and graphs of one process, shared by all the pipes that it compiles.

    Args:
        options: What the user chose.
        families: The block classes that the host's models consist of.
        rules: Wrappers (LoRA layers) that the host puts around a block's layers.

    Attributes:
        foreground: Hosts tell it when a picture begins and ends (`picture`).
        event_log: What happened to the kinds and why.
        checkpoint: What is drawn with now (`use_checkpoint`), or None.
        last_picture: The components that drew it.
        substituted: Why another backend builds than the one that was asked for, or "".
        stage, sizes_done: What a warm-up does now, and with how many of its sizes it has, for
            `status`; set by `WarmUp`.
    """

    def __init__(
        self,
        options: CompileOptions,
        families: Sequence[BlockFamily],
        rules: Sequence[WrapperRule] = (),
    ) -> None:
        super().__init__()
        keep_device_guard()
        self.spot_checks.enabled = options.spot_checks
        self.options, self.families, self.rules = options, families, tuple(rules)
        self.backend, substituted = choose_backend(options.backend)
        root = options.store if options.store is not None else default_root()
        self.library = GraphLibrary(root, options.store_limit_bytes)
        self.foreground, self.event_log = ForegroundScheduler(), EventLog()
        self.builder = Builder(self.library, self.backend, options, self.event_log, self.foreground)
        # Whoever was killed with its last graph leaves nothing to be built, and may have left more.
        self.builder.sweep()
        remove_stale()
        to_build = weakref.WeakMethod(self._to_build)
        self.background = BackgroundBuilds(
            self.builder, lambda: [] if (method := to_build()) is None else method()
        )
        self.read_ahead = ReadAhead(self.builder, self.key_entries)
        self.stage, self.sizes_done = "", (0, 0)
        self.checkpoint: CheckpointUse | None = None
        self._listener: ProgressListener | None = None
        self.captures = CudaGraphCache(
            CudaRecorder(),
            options.capture_limit if options.captures and self.backend.capturable else 0,
            options.capture_limit_bytes,
            self.spot_checks,
            self.found_wrong,
        )
        self._kinds: dict[tuple[str, torch.device], BlockKind] = {}
        self._current: set[str] = set()
        self._unproved: set[str] = set()
        self._fallbacks = Fallbacks()
        self._lock = threading.RLock()
        self._holding = 0
        self._entries: dict[torch.device, dict[str, str]] = {}
        self.substituted = substituted or ""
        self.last_picture = LastPicture()
        if substituted is not None:
            self.fell_back(f"the {options.backend} backend", substituted)
            logger.warning("%s", substituted)
        weakref.finalize(self, BackgroundBuilds.close, self.background)  # also when Python ends

    @property
    def listener(self) -> ProgressListener | None:
        """Told after each kind that was built."""
        return self._listener

    @listener.setter
    def listener(self, listener: ProgressListener | None) -> None:
        self._listener = self.background.listener = listener

    @property
    def precision(self) -> str:  # type: ignore[override]
        return self.options.precision

    @property
    def epoch(self) -> int:
        return self.foreground.epoch

    @property
    def moment(self) -> Hashable:
        return self.foreground.moment

    def key_entries(self, device: torch.device) -> dict[str, str]:
        if device not in self._entries:
            self._entries[device] = {
                "engine": ENGINE_SCHEMA,
                **machine_entries(device.type, device.index or 0),
                **self.backend.key_entries(device),
            }
        return self._entries[device]

    def find(self, key: KindKey, device: torch.device, make: Callable[[], BlockKind]) -> BlockKind:
        with self._lock:
            self._current.add(key.digest)
            kind = self._kinds.get((key.digest, device))
            if kind is None:
                kind = make()
                self._kinds[key.digest, device] = kind
                self._load(kind)
            return kind

    def fell_back(self, what: str, reason: str) -> None:
        self._fallbacks.add(what, reason)

    def rejected(self, kind: BlockKind) -> None:
        """A graph was wrong here: this process runs the block eager.

        What is wrong may be the graph, or what eager runs: somebody may have patched that. A
        stored graph is tried once more by a worker process, which nobody has patched. If it is
        wrong there, another one is built.
        """
        may_try = kind.source == "loaded" and self.options.build != "never"
        if not (may_try and self.builder.doubt(kind, kind.reason)):
            self.event_log.note(
                "bad", kind.label, f"its graph {kind.reason}", level=logging.WARNING
            )

    def found_wrong(self, what: str, problem: str, key: KindKey | None = None) -> None:
        """What had passed its comparison differed from eager in use: it is dropped by then, and
        reported in the status with the file to send to us."""
        report = write_incident(self.library.folder, what, problem, key)
        hint = f"; please attach {report} to an issue" if report is not None else ""
        self.fell_back(what, f"{problem}, in use{hint}")
        self.event_log.note("wrong", what, f"{problem}{hint}", level=logging.ERROR)

    @property
    def kinds(self) -> list[BlockKind]:
        """All kinds that were met, in the order of their first call."""
        with self._lock:
            return list(self._kinds.values())

    def current_kinds(self) -> list[BlockKind]:
        """The kinds that were met since the checkpoint was last changed (`use_checkpoint`)."""
        with self._lock:
            return [kind for (digest, _), kind in self._kinds.items() if digest in self._current]

    def missing(self) -> list[BlockKind]:
        """Kinds without a graph that could have one, those that cost most first; of those that
        lie on several devices, one at a time."""
        missing = {
            kind.key.digest: kind
            for kind in reversed(self.kinds)
            if kind.state is KindState.MISSING and not kind.is_coming and not kind.waits
        }
        return sorted(missing.values(), key=lambda kind: -kind.weight)

    # What a host calls around its pictures.

    def picture(self) -> AbstractContextManager[None]:
        """Everything drawn within the ``with`` block is one picture: graphs change before it or
        after it, never within. May be nested; a host that cannot say so need not."""
        return _Picture(self)

    def forward(self) -> AbstractContextManager[None]:
        """One forward of one model, for the models that `Component` wraps."""
        return self.foreground.forward()

    def drew(self, component: Drawn) -> None:
        """A component takes part in the picture that is being drawn."""
        self.last_picture.add(component, self.foreground.pictures_begun)

    def after_forward(self) -> None:
        """Build what a forward found missing, unless the user or a holder does not want it now."""
        if self._holding:
            return
        if self.options.build == "wait":
            if time.monotonic() >= self.builder.retry_at:
                self._build_and_wait()
        else:
            self.background.start()

    @contextmanager
    def holding_builds(self) -> Iterator[None]:
        """Only find kinds for the length of a ``with`` block; then build all of them together."""
        self._holding += 1
        try:
            yield
        finally:
            self._holding -= 1
        self.after_forward()

    def use_checkpoint(
        self,
        content_hash: str,
        *,
        name: str,
        path: str = "",
        architecture: str = "",
        device: torch.device | None = None,
    ) -> None:
        """Say which checkpoint is drawn with from now on.

        The graphs that it used last time are read ahead in a thread, the status counts its kinds
        only, and what it uses is recorded.

        Args:
            content_hash: From `ContentHashes`, 64 hexadecimal digits.
            name, path, architecture: For people.
            device: Where its models will be; None reads nothing ahead.
        """
        with self._lock:
            same = self.checkpoint is not None and self.checkpoint.content_hash == content_hash
            if not same:
                self._current.clear()
                self.last_picture.forget()
            self.checkpoint = CheckpointUse(
                self.library.folder, content_hash, name=name, path=path, architecture=architecture
            )
        if device is not None:
            self.read_ahead.start(content_hash, device)

    def record_checkpoint(self) -> None:
        """Keep which kinds the current checkpoint uses; done after each picture with news."""
        kinds = self.current_kinds()
        if self.options.build == "never":
            kinds = [kind for kind in kinds if kind.graph is not None]
        if self.checkpoint is not None:
            self.checkpoint.record(kinds)

    # What a user asks for.

    def status(self, since: Counter[tuple[str, str]] | None = None) -> Status:
        """What is drawn with and what is being made, at this moment. Cheap enough for polling.

        Args:
            since: From `fell_back_so_far`: reasons are those of calls after that moment.
        """
        return session_status(self, since)

    def build_missing(self) -> None:
        """Build what is missing and wait for it; what fails runs eager, with its reason."""
        self._ask_for_all()
        self._build_and_wait()

    def _ask_for_all(self) -> None:
        """What was put off is not waited for any longer."""
        self.builder.retry_at = 0.0
        for kind in self.kinds:
            kind.met(_ANY_EPOCH)

    def _build_and_wait(self) -> None:
        self.background.wait()
        missing = self._to_build()
        if missing:
            self.builder.build(missing, self.listener)

    def build_in_background(self) -> None:
        """Build what is missing beside the pictures, also after `cancel_builds`."""
        self._ask_for_all()
        self.background.resume()

    def cancel_builds(self) -> None:
        """End all builds within a moment; only what was being built is lost. What is missing now is
        not built until asked for (`build_in_background`); kinds that are met later are."""
        was_building = self.background.is_building
        self.background.cancel()
        if was_building:
            self.event_log.note("cancelled", f"{len(self.missing())} graphs", "by the user")

    def wait_for_builds(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being built; returns whether that came in time."""
        return self.background.wait(timeout_s)

    def retry_failed(self) -> int:
        """Try again what could not be built, here and in earlier processes; returns how many."""
        self.builder.build_records.retry()
        failed = [kind for kind in self.kinds if kind.state is KindState.FAILED]
        self.builder.trust_again()
        self._ask_for_all()
        for kind in failed:
            kind.miss("tried again")
        if failed and self.options.build == "background":
            self.background.resume()
        return len(failed)

    def load_missing(self) -> None:
        """Look again for graphs that have come into the store since, by an import for instance."""
        missing = self.missing()
        # Between two pictures, since graphs change there only.
        self.foreground.between_pictures(lambda: self._load_all(missing))

    def fallbacks(self, since: Counter[tuple[str, str]] | None = None) -> list[Fallback]:
        """Calls that ran eager and why, most frequent first; all, or those after a moment."""
        return self._fallbacks.since(since)

    def fell_back_so_far(self) -> Counter[tuple[str, str]]:
        """This moment, for `fallbacks` and `status`."""
        return self._fallbacks.so_far()

    def count(self, source: str) -> int:
        """How many kinds got their graph in this process by being ``"built"`` or ``"loaded"``."""
        return sum(kind.source == source for kind in self.kinds)

    def close(self) -> None:
        """End builds, worker processes and threads; graphs in use go on working."""
        self.background.close()

    def is_being_proved(self, kind: BlockKind) -> bool:
        """Whether a kind without a graph has a stored one that is tried first."""
        return kind.key.digest in self._unproved

    def _to_build(self) -> list[BlockKind]:
        missing = self.missing()
        if self.options.build == "never":
            return [kind for kind in missing if kind.key.digest in self._unproved]
        return missing

    def _load_all(self, kinds: Sequence[BlockKind]) -> None:
        for kind in kinds:
            if kind.state is KindState.MISSING:  # nobody was faster
                self._load(kind)

    def _load(self, kind: BlockKind) -> None:
        """Take a kind's stored graph, if it is known to be harmless; else leave it missing."""
        reason = self.backend.unavailable_reason(kind.device)
        if reason is not None:
            kind.fail(reason)
            return
        graph = self.read_ahead.take(kind.key.digest, kind.device)
        if graph is not None:
            kind.accept(graph, "loaded")
            self.event_log.note("loaded", kind.label, "read ahead")
            return
        stored = self.builder.stored(kind)
        if stored is None or stored.payload is None:
            self._note_miss(kind)
            return
        if not self.builder.is_load_safe(stored, kind):
            self._unproved.add(kind.key.digest)
            kind.miss("its stored graph was never loaded on this machine and is proved first")
            self.event_log.note("prove", kind.label, kind.reason)
            return
        try:
            kind.accept(self.builder.load(stored.payload, kind), "loaded")
            self.event_log.note("loaded", kind.label, "stored")
        except BackendError as exc:
            problem = f"cannot be loaded: {exc.message}"
            self.builder.refuse(kind, stored.header.payload_sha256, problem)
            kind.miss(f"its stored graph cannot be loaded: {exc.message}")

    def _note_miss(self, kind: BlockKind) -> None:
        failure = self.builder.known_failure(kind)
        if failure is not None:
            kind.fail(failure)
            self.event_log.note("failed", kind.label, failure, level=logging.WARNING)
        elif self.options.build == "never":
            # Nobody else will: who builds explains as well, on another thread.
            kind.reason = self.builder.why_missing(kind)
            self.event_log.note("missing", kind.label, kind.reason)


class _Picture(AbstractContextManager[None]):
    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._session.foreground.begin_picture()

    def __exit__(self, *exc_info: object) -> None:
        self._session.foreground.end_picture()
        self._session.record_checkpoint()
        if self._session.options.build != "wait":
            self._session.background.start()
