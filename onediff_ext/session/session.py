"""The session: the block kinds of this process, their graphs, and what happened to them."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager

import torch

from onediff_ext.backends.registry import choose_backend
from onediff_ext.building.build_context import BuildContext
from onediff_ext.building.build_folder import remove_stale
from onediff_ext.building.build_progress import ProgressListener
from onediff_ext.building.builder import Builder
from onediff_ext.building.event_log import EventLog
from onediff_ext.building.foreground_scheduler import ForegroundScheduler
from onediff_ext.building.picture_clock import ModelCall
from onediff_ext.building.read_ahead import ReadAhead
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
from onediff_ext.engine.memory_budget import MemoryBudget
from onediff_ext.engine.torch_versions import keep_device_guard
from onediff_ext.session.build_control import BuildControl, end_builds
from onediff_ext.session.checkpoint_use import CheckpointUse
from onediff_ext.session.incident_reports import write_incident
from onediff_ext.session.last_picture import Drawn, Fallback, Fallbacks, LastPicture
from onediff_ext.session.met_kinds import MetKinds
from onediff_ext.session.picture_gain import Picture
from onediff_ext.session.picture_timer import PictureTimer
from onediff_ext.session.session_memory import SessionMemory
from onediff_ext.session.status import session_status
from onediff_ext.session.stored_graph_lookup import StoredGraphLookup
from onediff_ext.session.substitutes import Substitute, substitutes
from onediff_ext.store import GraphLibrary, default_root

logger = logging.getLogger(__name__)

# A part of every key. Raised whenever the way from a block to its program changes, since older
# graphs then belong to another function.
ENGINE_SCHEMA = "2"


class Session(KindRegistry):
    """Kinds and graphs of one process, shared by all pipelines that it compiles.

    Args:
        options: The user's choices.
        families: The block classes of the host's models.
        rules: Wrappers (LoRA layers) that the host puts around a block's layers.

    Attributes:
        options, families, rules: As given.
        backend: Builds and loads graphs.
        library: The stored graphs.
        foreground: Hosts tell it when a picture begins and ends (`picture`).
        event_log: What happened to the kinds and why.
        build_context: What all parts of building share.
        builder: Builds kinds; `builder.run` is the present build run.
        background: The builds beside the pictures.
        tuning: The builds while the machine is idle.
        read_ahead: Graphs that are loaded while a checkpoint's weights are.
        cuda_graphs: The CUDA graphs.
        memory: Gives memory back to the rest of a picture and to the host.
        checkpoint: The checkpoint in use (`use_checkpoint`), or None.
        last_picture: The components that drew the last picture.
        timer: The time of the last picture.
        substituted: Why another backend builds than the chosen one, or ``""``.
        stage: What a warm-up does now, or ``""``; set by `WarmUp` for `status`.
        sizes_done: Finished and wanted sizes of a warm-up's stage; set by `WarmUp`.
    """

    def __init__(
        self,
        options: CompileOptions,
        families: Sequence[BlockFamily],
        rules: Sequence[WrapperRule] = (),
    ) -> None:
        super().__init__(MemoryBudget(limit_bytes=options.capture_limit_bytes))
        keep_device_guard()
        self.spot_checks.enabled = options.spot_checks
        self.options, self.families, self.rules = options, families, tuple(rules)
        self.backend, substituted = choose_backend(options.backend)
        root = options.store if options.store is not None else default_root()
        self.library = GraphLibrary(root, options.store_limit_bytes)
        self.foreground, self.event_log = ForegroundScheduler(), EventLog()
        self.build_context = BuildContext(
            self.library, self.backend, options, self.event_log, self.foreground
        )
        # Killed processes may leave partial files even when nothing is left to build.
        self.build_context.sweep()
        remove_stale()
        self.read_ahead, self._met = ReadAhead(self.build_context, self.key_entries), MetKinds()
        self._lookup = StoredGraphLookup(self.build_context, self.read_ahead)
        self.builder = Builder(self.build_context)
        self._builds = BuildControl(self.builder, self._met, self._lookup)
        self.background, self.tuning = self._builds.background, self._builds.tuning
        self.stage, self.sizes_done, self.substituted = "", (0, 0), substituted or ""
        self.checkpoint: CheckpointUse | None = None
        self.memory = SessionMemory(self)
        self.cuda_graphs = CudaGraphCache(
            CudaRecorder(),
            options.capture_limit if options.captures and self.backend.capturable else 0,
            self.budget,
            self.spot_checks,
            self.found_wrong,
        )
        self._fallbacks = Fallbacks()
        self._entries: dict[torch.device, dict[str, str]] = {}
        self.called_alone = self.foreground.call_alone
        self.last_picture, self.timer = LastPicture(), PictureTimer()
        if substituted is not None:
            self.fell_back(f"the {options.backend} backend", substituted)
            logger.warning("%s", substituted)
        weakref.finalize(self, end_builds, self.background, self.tuning)  # also when Python ends

    @property
    def listener(self) -> ProgressListener | None:
        """Called after each kind that was built, or None."""
        return self._builds.listener

    @listener.setter
    def listener(self, listener: ProgressListener | None) -> None:
        self._builds.listener = listener

    # What a block's runner asks (`KindRegistry`).

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
        return self._met.find(key, device, make, self._lookup.look_up)

    def fell_back(self, what: str, reason: str) -> None:
        self._fallbacks.add(what, reason)

    def rejected(self, kind: BlockKind) -> None:
        """A graph was wrong in this process: the block runs eager.

        The cause may be an extension that patched what eager runs. So a worker process without
        extensions checks a stored graph again, and another is built if it is wrong there too.
        """
        may_recheck = kind.source == "loaded" and self.build_context.may_build
        if not (may_recheck and self.build_context.graph_trust.recheck(kind, kind.reason)):
            self.event_log.note(
                "bad", kind.label, f"its graph {kind.reason}", level=logging.WARNING
            )

    def found_wrong(self, what: str, problem: str, key: KindKey | None = None) -> None:
        """Report a graph or CUDA graph that passed its comparison and differed from eager later.

        It is dropped already. The status names the report file that the user should send to us.

        Args:
            what: The kind's label, or the model.
            problem: What was seen.
            key: Of the kind, or None for a CUDA graph.
        """
        report = write_incident(self.library.folder, what, problem, key)
        hint = f"; please attach {report} to an issue" if report is not None else ""
        self.fell_back(what, f"{problem}, in use{hint}")
        self.event_log.note("wrong", what, f"{problem}{hint}", level=logging.ERROR)

    # The kinds.

    @property
    def kinds(self) -> list[BlockKind]:
        """All kinds that were met, in the order of their first call."""
        return self._met.all()

    def current_kinds(self) -> list[BlockKind]:
        """Return the kinds met since the checkpoint was last changed (`use_checkpoint`)."""
        return self._met.current()

    def missing(self) -> list[BlockKind]:
        """Return kinds without a graph that could have one; see `MetKinds.missing`."""
        return self._met.missing()

    def awaits_load_check(self, kind: BlockKind) -> bool:
        """Whether a kind without a graph has a stored one that is checked first.

        Args:
            kind: A kind that this session has met.
        """
        return self._lookup.awaits_load_check(kind)

    def count(self, source: str) -> int:
        """Return how many kinds have a graph from a source in this process.

        Args:
            source: ``"built"`` or ``"loaded"``.
        """
        return sum(kind.source == source for kind in self.kinds)

    # What a host calls around its pictures.

    def picture(self) -> AbstractContextManager[None]:
        """Draw one picture within the ``with`` block: graphs change before or after it only.

        It may be nested. Forwards outside of it are told apart by `PictureClock`.
        """
        return Picture(self)

    def forward(self, call: Callable[[], ModelCall] | None = None) -> AbstractContextManager[None]:
        """Return a context for one forward of a model; for the models that `Component` wraps.

        Args:
            call: Tells which picture an unannounced forward belongs to.
        """
        return self.foreground.forward(call)

    def drew(self, component: Drawn) -> bool:
        """Count a component to the picture that is being drawn.

        Args:
            component: The component that runs.

        Returns:
            Whether this is its first forward in the picture.
        """
        return self.last_picture.add(component, self.foreground.pictures_begun)

    def after_forward(self) -> None:
        """Build what a forward found missing, unless builds are held or paused."""
        self._builds.after_forward()

    def after_picture(self) -> None:
        """Record the checkpoint's kinds, and build what a picture found missing."""
        self.memory.give_back()
        self.record_checkpoint()
        # Only here: a bare module's call says nothing of what a user wants after a cancel.
        self.background.needed(self.last_picture.kinds, self.last_picture.number)
        self._builds.after_picture()

    def holding_builds(self) -> AbstractContextManager[None]:
        """Only find kinds within the ``with`` block; build all of them together after it."""
        return self._builds.holding()

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

        A thread loads the graphs that it used last time, the status counts its kinds only, and its
        kinds are recorded.

        Args:
            content_hash: From `ContentHashes`, 64 hexadecimal digits.
            name, path, architecture: For people.
            device: The device that its models will be on; None loads nothing ahead.
        """
        with self._met.lock:
            same = self.checkpoint is not None and self.checkpoint.content_hash == content_hash
            if not same:
                self._met.forget_current()
                self.last_picture.forget()
            self.checkpoint = CheckpointUse(
                self.library.folder, content_hash, name=name, path=path, architecture=architecture
            )
        if device is not None:
            self.read_ahead.start(self.checkpoint.recorded_kinds, device)

    def record_checkpoint(self) -> None:
        """Record the kinds of the current checkpoint, if there are new ones."""
        kinds = self.current_kinds()
        if not self.build_context.may_build:
            kinds = [kind for kind in kinds if kind.graph is not None]
        if self.checkpoint is not None:
            self.checkpoint.record(kinds)

    # What a user asks for.

    def substitutes(self, device: torch.device | None = None) -> Sequence[Substitute]:
        """Return what is used in place of options that this machine cannot follow.

        Args:
            device: Where the models are; None for where this machine draws.
        """
        return substitutes(self.options, self.backend.name, self.substituted, device)

    def status(self, since: Counter[tuple[str, str]] | None = None) -> Status:
        """Return the status at this moment. Cheap enough for polling.

        Args:
            since: From `fell_back_so_far`: reasons are those of calls after that moment.
        """
        return session_status(self, since)

    def build_missing(self) -> None:
        """Build what is missing and wait for it. What fails runs eager, with its reason."""
        self._builds.build_missing()

    def build_in_background(self) -> None:
        """Build what is missing beside the pictures, also after `cancel_builds`, unless paused."""
        self._builds.build_in_background()

    def cancel_builds(self) -> None:
        """End all builds within a moment; only graphs in work are lost.

        Kinds that are missing now are built again when an announced picture needs them, and
        by `build_in_background`. Kinds that are met later are built.
        """
        self._builds.cancel()

    @property
    def builds_are_paused(self) -> bool:
        """Whether builds wait for `go_on_with_builds`."""
        return self.background.is_paused

    def pause_builds(self) -> None:
        """End all builds, losing only graphs in work; build nothing until `go_on_with_builds`."""
        self._builds.pause()

    def go_on_with_builds(self) -> None:
        """End a pause, and build what is missing beside the pictures, also what was cancelled."""
        self._builds.go_on()

    def wait_for_builds(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being built.

        Args:
            timeout_s: How long; None waits for ever.

        Returns:
            False when builds are still running after `timeout_s`.
        """
        return self.background.wait(timeout_s)

    def retry_failed(self) -> int:
        """Try again what could not be built, here and in earlier processes.

        Returns:
            The number of failed kinds of this process.

        Raises:
            StoreError: The store's records cannot be written.
        """
        return self._builds.retry_failed()

    def load_missing(self) -> None:
        """Look again for stored graphs, for instance after an import."""
        missing = self.missing()
        # Between two pictures, since graphs change there only.
        self.foreground.between_pictures(lambda: self._look_up_again(missing))

    def fallbacks(self, since: Counter[tuple[str, str]] | None = None) -> list[Fallback]:
        """Return the calls that ran eager and why, most frequent first.

        Args:
            since: From `fell_back_so_far`; None counts all calls.
        """
        return self._fallbacks.since(since)

    def fell_back_so_far(self) -> Counter[tuple[str, str]]:
        """Return the calls until this moment, for `fallbacks` and `status`."""
        return self._fallbacks.so_far()

    def close(self) -> None:
        """End builds, worker processes and threads; graphs in use go on working."""
        self.read_ahead.cancel()
        end_builds(self.background, self.tuning)

    def _look_up_again(self, kinds: Sequence[BlockKind]) -> None:
        for kind in kinds:
            if kind.state is KindState.MISSING:  # a build may have been faster
                self._lookup.look_up(kind)
