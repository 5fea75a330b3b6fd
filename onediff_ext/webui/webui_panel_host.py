"""The panel's port to a WebUI."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onediff_ext.core.errors import OptionError
from onediff_ext.core.status import Status
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.field_schema import schema
from onediff_ext.panel.panel_host import PanelHost, WarmUpStep
from onediff_ext.panel.warm_up_sizes import recent_sizes
from onediff_ext.store import GraphLibrary
from onediff_ext.webui.extension import Extension
from onediff_ext.webui.settings import HOST_FEATURES

if TYPE_CHECKING:
    import torch

_LOOK_SECONDS = 0.5


class WebUIPanelHost(PanelHost):
    """The extension as the panel and the API see it.

    Args:
        extension: Gives the state; asked for each time, since "Reload UI" makes a new one.
    """

    def __init__(self, extension: Callable[[], Extension]) -> None:
        self._extension = extension
        self._warming = threading.Lock()

    def status(self) -> Status:
        return self._extension().status()

    def cancel(self) -> None:
        self._extension().acceleration.cancel()

    def library(self) -> GraphLibrary:
        return self._extension().library()

    def machine(self) -> str:
        from onediff_ext.engine.machine import machine_digest

        return machine_digest(_device())

    def picture_folders(self) -> Sequence[Path]:
        from modules import shared

        opts = shared.opts
        names = ("outdir_samples", "outdir_txt2img_samples", "outdir_img2img_samples")
        folders = [getattr(opts, name, "") for name in names]
        return [Path(folder) for folder in dict.fromkeys(folders) if folder]

    def off_reason(self) -> str | None:
        if _device().type == "cuda":
            return None
        return "There is no GPU here, where graphs win little: off unless you turn it on."

    def missing_reason(self) -> str | None:
        from onediff_ext.backends.registry import why_no_graphs

        return why_no_graphs(_device())

    def why_no_import(self) -> str | None:
        from modules import shared

        from onediff_ext.webui.host_access import why_no_import

        return why_no_import(shared.cmd_opts)

    def features(self) -> frozenset[str]:
        return HOST_FEATURES

    def schema(self) -> dict[str, object]:
        return schema(HOST_FEATURES)

    def warm_up(self, choices: Choices) -> Iterator[WarmUpStep]:
        if not choices.enabled:
            raise OptionError("OneDiff is off.", "Turn it on to warm up.")
        choices.check_features(HOST_FEATURES)
        shapes = choices.warm_up_shapes() or recent_sizes(self.picture_folders())
        if not shapes:
            raise OptionError("There is no size to warm up.", 'Write for example "512x768".')
        extension = self._extension()
        options = extension.compile_options(choices)
        if not self._warming.acquire(blocking=False):
            raise OptionError("A warm-up is running already.", "Cancel it first.")
        done, reports = [0], []

        def listen(finished: int, _: int) -> None:
            done[0] = finished

        def work() -> None:
            try:
                report = extension.acceleration.warm_up(shapes, options, choices.ignores, listen)
                reports.append(report)
            finally:
                self._warming.release()

        thread = threading.Thread(target=work, name="onediff-warm-up", daemon=True)
        thread.start()
        while thread.is_alive():
            yield self._step(done[0], len(shapes))
            thread.join(_LOOK_SECONDS)
        made = reports[0] if reports else None
        summary = self.status().line() if made is None else made.line()
        yield WarmUpStep(1, 1, "done", summary=summary)

    def start_warm_up(self, choices: Choices) -> None:
        """Warm up without anybody watching: for the API, and when a checkpoint loads.

        Raises:
            OneDiffError: It cannot begin.
        """
        steps = self.warm_up(choices)
        next(steps)  # what is wrong with the choices is said to the caller
        threading.Thread(
            target=lambda: all(steps), name="onediff-warm-up-watch", daemon=True
        ).start()

    def _step(self, done: int, needed: int) -> WarmUpStep:
        status = self.status()
        if status.building:
            ready = status.kinds_ready + status.kinds_failed
            note = f"building {', '.join(status.building_now)}".strip()
            return WarmUpStep(ready, status.kinds_needed, note, status.seconds_left)
        return WarmUpStep(done, needed, status.stage or "waiting for its turn")


def _device() -> torch.device:
    """What the WebUI draws on, as far as torch knows."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
