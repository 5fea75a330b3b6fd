"""The extension's state in the host's process: made at the first use, gone at "Reload UI"."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.core.errors import OneDiffError
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.status import Status
from onediff_ext.hosts.base import WebUIHost
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.fields import CUSTOM, DRAW_WITHOUT, STOP
from onediff_ext.store import GraphLibrary, default_root
from onediff_ext.webui.acceleration import Acceleration
from onediff_ext.webui.settings import Settings

logger = logging.getLogger(__name__)


class Extension:
    """What a job, the panel, the API and the settings have in common.

    Args:
        host: The adapter of the running WebUI.
        options: The host's ``shared.opts``.
    """

    def __init__(self, host: WebUIHost, options: Any) -> None:
        self.host, self.settings = host, Settings(options)
        self.acceleration = Acceleration(host)
        self._why_without = ""
        self._jobs_seen = False

    def compile_options(self, choices: Choices) -> CompileOptions:
        """The options of a session, from the panel and the settings page.

        Raises:
            OptionError: A setting cannot be used.
        """
        if choices.preset != CUSTOM:
            choices = replace(choices, backend=self.settings.get("onediff_backend"))
        return choices.compile_options(
            store=self.settings.store,
            store_limit_bytes=self.settings.store_limit_bytes,
            build=self.settings.build,
        )

    def begin(self, job: Any, choices: Choices) -> str | None:
        """A job starts.

        Returns:
            Why it runs without graphs although they are wanted, or None.
        """
        self._why_without = ""
        if not choices.enabled:
            self._off(job)
            return None
        outside = next(filter(None, (choices.outside(*shape) for shape in job_shapes(job))), None)
        if outside is not None:
            self._off(job)
            self._why_without = outside
            return outside
        self._jobs_seen = True
        self.acceleration.begin(
            job,
            self.compile_options(choices),
            choices.ignores,
            deepcache=DeepCacheOptions.parse(choices.deepcache),
        )
        return next(iter(self.acceleration.status().reasons), None)

    def refuse(self, job: Any, reason: str) -> None:
        """A job starts whose choices cannot be used: it runs without graphs, and says why."""
        self._off(job)
        self._why_without = reason

    def stops(self, choices: Choices) -> bool:
        """Whether a job that cannot use graphs is to stop."""
        policies = (choices.on_failure, self.settings.get("onediff_on_failure"))
        return STOP in policies and policies[0] != DRAW_WITHOUT

    def status(self) -> Status:
        """What is true now."""
        if self._why_without:
            return Status("eager", reasons=(self._why_without,))
        return self.acceleration.status()

    def library(self) -> GraphLibrary:
        """The graph library of the settings page."""
        root = self.settings.store
        if root is None:
            root = default_root()
        return GraphLibrary(Path(root), self.settings.store_limit_bytes)

    def close(self) -> None:
        """Undo everything."""
        self.acceleration.close()

    def _off(self, job: Any) -> None:
        # While nothing was ever on, a job that is off must not meet us at all.
        if self._jobs_seen:
            self.acceleration.begin(job, None)


def job_shapes(job: Any) -> list[tuple[int, int, int]]:
    """(width, height, pictures at once) of a job, in pixels; the second pass of hires-fix too."""
    width, height = int(job.width), int(job.height)
    batch = int(getattr(job, "batch_size", 1) or 1)
    shapes = [(width, height, batch)]
    if getattr(job, "enable_hr", False):
        scale = float(getattr(job, "hr_scale", 1) or 1)
        second = (
            int(getattr(job, "hr_resize_x", 0) or 0) or round(width * scale),
            int(getattr(job, "hr_resize_y", 0) or 0) or round(height * scale),
            batch,
        )
        shapes.append(second)
    return shapes


_current: Extension | None = None


def current() -> Extension:
    """The extension of this process, made when it is first needed.

    Raises:
        OneDiffError: This WebUI is not known.
    """
    global _current
    if _current is None:
        from modules import shared

        from onediff_ext.hosts.detect import make_host

        _current = Extension(make_host(), shared.opts)
    return _current


def existing() -> Extension | None:
    """The extension of this process, if anything has needed it so far."""
    return _current


def close_current() -> None:
    """Undo everything and forget it; the next use begins anew."""
    global _current
    if _current is not None:
        try:
            _current.close()
        except OneDiffError as exc:
            logger.warning("%s", exc)
        _current = None
