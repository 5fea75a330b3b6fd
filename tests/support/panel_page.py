"""The page of `tests/browser/served_panel.py`, open in a browser."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onediff_ext.core.status import Status

ACCORDION = "onediff_txt2img"


class PanelPage:
    """The open page.

    Args:
        page: Playwright's page.
        folder: Of the served status.
        gradio: The version that serves it.

    Attributes:
        errors: What the browser's console says is wrong.
    """

    def __init__(self, page: Any, folder: Path, gradio: str) -> None:
        self.page, self.folder, self.gradio = page, folder, gradio
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self, theme: str = "light", width: int = 650) -> None:
        """Reload the page."""
        self.page.set_viewport_size({"width": width, "height": 1000})
        self.page.goto(f"{self.url}?__theme={theme}")
        self.page.wait_for_selector(f"#{ACCORDION} .onediff-status")
        self.page.wait_for_selector(f"#{ACCORDION}-visible-checkbox")

    @property
    def url(self) -> str:
        """Where the page is."""
        return (self.folder / "url.txt").read_text()

    def show(self, status: Status, language: str = "", *, warms_up: bool = False) -> None:
        """Serve a status, and wait until the page shows it.

        Args:
            status: The status.
            language: Of the page.
            warms_up: Whether a warm-up that was started goes on.
        """
        mark = f"mark {time.monotonic_ns()}"
        fields = asdict(status) | {"deepcache": mark}
        text = json.dumps({"status": fields, "language": language, "warms_up": warms_up})
        whole = self.folder / "status.json"
        whole.with_suffix(".part").write_text(text)
        whole.with_suffix(".part").replace(whole)
        self.press("refresh", hidden=True)
        if status.running == "off":
            self.page.wait_for_timeout(300)
            return
        self.page.wait_for_selector(f"#{ACCORDION}_details >> text={mark}", timeout=20_000)

    def press(self, name: str, *, hidden: bool = False) -> None:
        """Click an element of the panel."""
        element = self.page.locator(f"#{ACCORDION}_{name}")
        if hidden:
            element.evaluate("button => button.click()")
        else:
            element.click()

    def fold(self, name: str) -> None:
        """Open or close an accordion within the panel."""
        self.page.locator(f"#{ACCORDION}_{name} > .label-wrap").click()

    def text(self, name: str) -> str:
        """The text of an element of the panel; Gradio 3 has an outer and an inner one."""
        return str(self.page.locator(f"#{ACCORDION}_{name}").first.inner_text())

    def buttons(self) -> list[str]:
        """The buttons for builds that can be pressed."""
        names = ("warm_up", "pause", "go_on", "cancel")
        buttons = {name: self.page.locator(f"#{ACCORDION}_{name}") for name in names}
        return [name for name, b in buttons.items() if b.is_visible() and b.is_enabled()]

    def until(self, condition: Any, what: str) -> None:
        """Wait until a condition holds."""
        ends_at = time.monotonic() + 20
        while time.monotonic() < ends_at:
            if condition():
                return
            self.page.wait_for_timeout(100)
        raise AssertionError(f"{what} did not come; the console says {self.errors}")

    def done(self) -> list[str]:
        """What the buttons had the panel's host do, in order."""
        path = self.folder / "done.txt"
        return path.read_text().splitlines() if path.exists() else []
