"""The panel's connection to a WebUI."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from onediff_ext.core.errors import OptionError
from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.core.status import Status
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.panel_host import PanelHost
from onediff_ext.panel.phrases import Phrases, phrases_in
from onediff_ext.panel.warm_up_run import WarmUpRun
from onediff_ext.session.warm_up_report import WarmUpReport
from onediff_ext.store import GraphLibrary
from onediff_ext.webui.extension import Extension
from onediff_ext.webui.request_schema import request_schema
from onediff_ext.webui.settings import HOST_FEATURES

if TYPE_CHECKING:
    import torch


class WebUIPanelHost(PanelHost):
    """The extension as the panel and the API see it.

    Args:
        extension: Returns the current extension; "Reload UI" makes a new one.
    """

    def __init__(self, extension: Callable[[], Extension]) -> None:
        self._extension = extension
        self._warm_up = WarmUpRun()

    def status(self) -> Status:
        extension = self._extension()
        return replace(
            extension.status(),
            warming_up=self._warm_up.is_running,
            paused=extension.graphs.builds_are_paused,
        )

    def cancel(self) -> None:
        self._extension().warm_ups.cancel()

    def pause(self) -> None:
        self._extension().graphs.pause_builds()

    def go_on(self) -> None:
        self._extension().graphs.go_on_with_builds()

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

    def schema(self) -> dict[str, object]:
        return request_schema()

    def name(self) -> str:
        from onediff_ext.hosts.detect import host_name

        return host_name()

    def phrases(self) -> Phrases:
        from modules import shared

        return phrases_in(str(getattr(shared.opts, "localization", "")))

    def file_of_module(self, name: str) -> str | None:
        loaded = getattr(sys.modules.get("modules.script_loading"), "loaded_scripts", {})
        wanted = name.rpartition(".")[2] if name.startswith("scripts.") else name
        for path in map(str, loaded):
            if Path(path).name in (wanted, f"{wanted}.py"):
                return path
        return None

    def features(self) -> frozenset[str]:
        return HOST_FEATURES

    def warm_up(self, choices: Choices) -> Iterator[str]:
        shapes = self.warm_up_shapes(choices)
        extension = self._extension()
        options = extension.compile_options(choices)
        guidance_steps = GuidanceOptions.parse(choices.guidance_steps)

        def work() -> WarmUpReport:
            if extension.graphs.builds_are_paused:
                self.go_on()
            report = extension.warm_ups.run(shapes, options, choices.ignores, guidance_steps)
            if report is None:
                reasons = self.status().reasons or ("nothing of it can be built here",)
                raise OptionError(f"Nothing was warmed up: {reasons[0]}.")
            return report

        yield from self._warm_up.steps(work, self.phrases())

    def warm_up_state(self) -> dict[str, object]:
        """Whether a warm-up runs, and the result of the last one in one line; for the API."""
        return {"running": self._warm_up.is_running, "summary": self._warm_up.line}

    def start_warm_up(self, choices: Choices) -> None:
        """Warm up without a viewer: for the API, and when a checkpoint loads.

        Raises:
            OneDiffError: The warm-up cannot start.
        """
        next(self.warm_up(choices))  # errors in the choices reach the caller
