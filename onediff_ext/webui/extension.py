"""The extension's state in the host's process, from the first use until "Reload UI"."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.core.errors import OneDiffError
from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.status import Status
from onediff_ext.hosts.base import HostCheckpoint, WebUIHost
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.fields import DRAW_WITHOUT, STOP
from onediff_ext.panel.presets import CUSTOM
from onediff_ext.session.graph_savings import USUAL_LOAD_S, saved_by_graphs_s
from onediff_ext.session.session import Session
from onediff_ext.session.substitutes import Substitute
from onediff_ext.store import GraphLibrary, default_root
from onediff_ext.store.last_use import WebUIUse, WebUIUses
from onediff_ext.webui.first_picture import job_shapes, work_of
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from onediff_ext.webui.settings import Settings
from onediff_ext.webui.warm_up_jobs import WarmUpJobs

logger = logging.getLogger(__name__)

_MAX_JOBS = 8
_WRITE_S = 1.0


class Extension:
    """The state that jobs, panel, API and settings share.

    Args:
        host: The adapter of the running WebUI.
        options: The host's ``shared.opts``.

    Attributes:
        graphs: Puts graphs under the host's models for each job.
        warm_ups: Warms up the current checkpoint.
    """

    def __init__(self, host: WebUIHost, options: Any) -> None:
        self.host, self.settings = host, Settings(options)
        self.graphs = GraphsForJobs(host)
        self.warm_ups = WarmUpJobs(self.graphs)
        self._notes: tuple[str, ...] = ()
        self._substitutes: Sequence[Substitute] = ()
        self._was_ever_on = self._is_off = False
        self._is_first_job = True
        # Of the jobs that have graphs, by id. A job that failed may never end.
        self._choices: dict[int, Choices] = {}
        self._last_use: WebUIUse | None = None
        self._use_before: WebUIUse | None = None  # of the process before this one
        self._writing: threading.Thread | None = None

    def compile_options(self, choices: Choices) -> CompileOptions:
        """The options of a session, from panel and settings page.

        Raises:
            OptionError: A setting cannot be used.
        """
        if choices.preset != CUSTOM:
            choices = replace(choices, backend=self.settings.get("onediff_backend"))
        return choices.compile_options(
            store=self.settings.store,
            store_limit_bytes=self.settings.store_limit_bytes,
            build=self.settings.build,
            tuning=self.settings.tuning,
        )

    def before_load(self, job: Any) -> None:
        """Called before the host loads a job's model, which takes seconds in Forge.

        Args:
            job: The host's processing object ``p``.
        """
        use = self._use_before
        if use is None or not use.saved_s or not self._is_first_job:
            return
        if torch.device(use.device).type == "cpu":  # steps take longer there than loading does
            return
        self.graphs.before_load(use.saved_s * work_of(job), use.load_s or USUAL_LOAD_S)

    def begin(self, job: Any, choices: Choices, notes: tuple[str, ...] = ()) -> str | None:
        """Start a job.

        Args:
            job: The host's processing object ``p``.
            choices: What the user chose.
            notes: Choices that were ignored, and why; for the status.

        Returns:
            Why the user's choice of graphs cannot be followed, or None.
        """
        self._notes = notes
        self._is_off = not choices.enabled
        if not choices.enabled:
            self._forget_use()
            self._begin_without_graphs(job)
            return None
        outside = next(
            filter(None, (choices.outside_reason(*shape) for shape in job_shapes(job))), None
        )
        if outside is not None:
            self._begin_without_graphs(job, outside)
            return outside
        self._was_ever_on = True
        if len(self._choices) > _MAX_JOBS:
            self._choices.clear()
        self._choices[id(job)] = choices
        self.graphs.begin(
            job,
            self.compile_options(choices),
            choices.ignores,
            deepcache=DeepCacheOptions.parse(choices.deepcache),
            guidance_steps=GuidanceOptions.parse(choices.guidance_steps),
        )
        session = self.graphs.session
        self._substitutes = () if session is None else session.substitutes()
        reasons = (*self.graphs.status().reasons, *(each.reason for each in self._substitutes))
        return next(iter(reasons), None)

    def end(self, job: Any) -> None:
        """End a job, and remember what it was drawn with.

        Args:
            job: The host's processing object ``p``.
        """
        self.graphs.end(job)
        self._is_first_job = False
        choices = self._choices.pop(id(job), None)
        if choices is not None:
            try:
                self._note_use(choices, work_of(job))
            except Exception:  # the picture is there: nothing may end it
                logger.debug("The last use is not known", exc_info=True)

    def read_ahead(self) -> threading.Thread:
        """Load the graphs of the last picture before this start, if the host will draw it again.

        Returns:
            The thread that begins to load them.
        """
        thread = threading.Thread(target=self._read_ahead, name="onediff-start", daemon=True)
        thread.start()
        return thread

    def drawn_choices(self, choices: Choices) -> Choices:
        """The choices with which the job that has begun is drawn.

        Args:
            choices: What the user chose; what this machine lacks is replaced.
        """
        used: dict[str, Any] = {each.option: each.used for each in self._substitutes}
        return replace(choices, **used)

    def refuse(self, job: Any, reason: str) -> None:
        """Start a job whose choices are unusable: it runs without graphs, for this reason."""
        self._notes = ()
        self._begin_without_graphs(job, reason)

    def add_note(self, note: str) -> None:
        """Have the status say one thing more about this job.

        Args:
            note: One sentence.
        """
        self._notes = (*self._notes, note)

    def stops(self, policy: str) -> bool:
        """Whether a job that cannot use graphs stops.

        Args:
            policy: The job's choice "on_failure".
        """
        policies = (policy, self.settings.get("onediff_on_failure"))
        return STOP in policies and policy != DRAW_WITHOUT

    def status(self) -> Status:
        """The current status."""
        return replace(self.graphs.status(), notes=self._notes)

    def library(self) -> GraphLibrary:
        """The graph store of the settings page."""
        root = self.settings.store
        if root is None:
            root = default_root()
        return GraphLibrary(Path(root), self.settings.store_limit_bytes)

    def close(self) -> None:
        """Undo all changes to the host and end all builds."""
        self.warm_ups.cancel()
        self.graphs.close()
        self.wait_for_writes()

    def wait_for_writes(self) -> None:
        """Wait until the store says what the last picture was drawn with, or for a second."""
        if self._writing is not None:
            self._writing.join(_WRITE_S)

    def _note_use(self, choices: Choices, work: float) -> None:
        session, checkpoint, device = (
            self.graphs.session,
            self.host.checkpoint(),
            self.host.device(),
        )
        if session is None or session.checkpoint is None or checkpoint is None or device is None:
            return
        if session.checkpoint.content_hash != checkpoint.content_hash:
            return
        use = WebUIUse(
            asdict(choices),
            checkpoint.content_hash,
            checkpoint.name,
            checkpoint.path,
            checkpoint.architecture,
            str(device),
            *self._seconds(session, checkpoint.content_hash, work),
        )
        if use != self._last_use:
            self._last_use = use
            self._write(WebUIUses(session.library.folder).note, self.host.name, use)

    def _seconds(self, session: Session, content_hash: str, work: float) -> tuple[float, float]:
        """`WebUIUse.saved_s` and `load_s`, measured once for a checkpoint in this process."""
        known = self._last_use or self._use_before
        if known is not None and known.content_hash != content_hash:
            known = None
        saved_s, load_s = (known.saved_s, known.load_s) if known else (0.0, 0.0)
        if known is None or known is self._use_before or not saved_s:
            saved_s = saved_by_graphs_s(session.kinds, session.timer.steps_s) / work or saved_s
            load_s = session.read_ahead.load_s or load_s
        return round(saved_s, 4), round(load_s, 3)

    def _forget_use(self) -> None:
        """The first picture after a start is drawn without graphs: load none at the next start."""
        session = self.graphs.expected
        if session is not None:
            self.graphs.forget_expected()
            self._write(WebUIUses(session.library.folder).forget, self.host.name)

    def _write(self, function: Callable[..., None], *arguments: object) -> None:
        """Write to the store in a thread: another process may hold its locks for a while."""
        self._writing = threading.Thread(target=function, args=arguments, daemon=True)
        self._writing.start()

    def _read_ahead(self) -> None:
        try:
            use = WebUIUses(self.library().folder).of(self.host.name)
            if use is not None and use.path == self.host.chosen_path():
                self._use_before = use
                options = self.compile_options(Choices.parse(use.choices))
                checkpoint = HostCheckpoint(
                    use.name, "", use.architecture, use.content_hash, use.path
                )
                self.graphs.expect(options, checkpoint, torch.device(use.device))
                if self._is_off:  # meanwhile
                    self.graphs.forget_expected()
        except Exception:  # the first picture loads its graphs itself
            logger.debug("No graphs are loaded at the start", exc_info=True)

    def _begin_without_graphs(self, job: Any, reason: str = "") -> None:
        """Start a job without graphs.

        Args:
            job: The host's processing object ``p``.
            reason: Why, although the user wants graphs; ``""`` when OneDiff is off.
        """
        self._substitutes = ()
        self._choices.pop(id(job), None)
        # Until OneDiff was on once, jobs run without any contact with it.
        if self._was_ever_on:
            self.graphs.begin(job, None)
        self.graphs.eager.clear()
        if reason:
            self.graphs.eager.add(reason)


_current: Extension | None = None


def current() -> Extension:
    """The extension of this process, made at the first call.

    Raises:
        OneDiffError: This WebUI is not supported.
    """
    global _current
    if _current is None:
        from modules import shared

        from onediff_ext.hosts.detect import make_host

        _current = Extension(make_host(), shared.opts)
    return _current


def existing() -> Extension | None:
    """The extension of this process; None before the first call of `current`."""
    return _current


def close_current() -> None:
    """Close the extension of this process; the next `current` makes a new one."""
    global _current
    if _current is not None:
        try:
            _current.close()
        except OneDiffError as exc:
            logger.warning("%s", exc)
        _current = None
