"""The panel's connection to a WebUI."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onediff_ext.core.errors import OptionError
from onediff_ext.core.status import Status
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.panel_host import PanelHost, WarmUpStep
from onediff_ext.store import GraphLibrary
from onediff_ext.webui.extension import Extension
from onediff_ext.webui.settings import HOST_FEATURES

if TYPE_CHECKING:
    import torch

_POLL_S = 0.5


class WebUIPanelHost(PanelHost):
    """The extension as the panel and the API see it.

    Args:
        extension: Returns the current extension; "Reload UI" makes a new one.
    """

    def __init__(self, extension: Callable[[], Extension]) -> None:
        self._extension = extension
        self._warming = threading.Lock()

    def status(self) -> Status:
        return self._extension().status()

    def cancel(self) -> None:
        self._extension().warm_ups.cancel()

    def library(self) -> GraphLibrary:
        return self._extension().library()

    def device(self) -> torch.device:
        import torch

        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def picture_folders(self) -> Sequence[Path]:
        from modules import shared

        opts = shared.opts
        names = ("outdir_samples", "outdir_txt2img_samples", "outdir_img2img_samples")
        folders = [getattr(opts, name, "") for name in names]
        return [Path(folder) for folder in dict.fromkeys(folders) if folder]

    def no_import_reason(self) -> str | None:
        from modules import shared

        from onediff_ext.webui.host_access import no_import_reason

        return no_import_reason(shared.cmd_opts)

    def features(self) -> frozenset[str]:
        return HOST_FEATURES

    def warm_up(self, choices: Choices) -> Iterator[WarmUpStep]:
        shapes = self.warm_up_shapes(choices)
        extension = self._extension()
        options = extension.compile_options(choices)
        if not self._warming.acquire(blocking=False):
            raise OptionError("A warm-up is running already.", "Cancel it first.")
        sizes_done, reports = [0], []

        def listen(done: int, _: int) -> None:
            sizes_done[0] = done

        def work() -> None:
            try:
                reports.append(extension.warm_ups.run(shapes, options, choices.ignores, listen))
            finally:
                self._warming.release()

        thread = threading.Thread(target=work, name="onediff-warm-up", daemon=True)
        thread.start()
        while thread.is_alive():
            yield self._step(sizes_done[0], len(shapes))
            thread.join(_POLL_S)
        report = reports[0] if reports else None
        summary = self.status().line() if report is None else report.line()
        yield WarmUpStep(1, 1, "done", summary=summary)

    def start_warm_up(self, choices: Choices) -> None:
        """Warm up without a viewer: for the API, and when a checkpoint loads.

        Raises:
            OneDiffError: The warm-up cannot start.
        """
        steps = self.warm_up(choices)
        next(steps)  # errors in the choices reach the caller
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
