"""The panel on the page of the running WebUI, in a real browser: layout, keys, console."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from onediff_ext.core.headline import Headline
from onediff_ext.core.status import Status
from onediff_ext.panel import html
from onediff_ext.panel.details import detail_lines
from onediff_ext.panel.header import header_of
from onediff_ext.panel.phrases import phrases_in
from onediff_ext.panel.reasons import explain
from tests.support.browser import browser, outside
from tests.support.header_states import LONG, STATES
from tests.support.webui_client import WebUI

PANEL = "#onediff_txt2img"
DOCS = Path(__file__).resolve().parents[2] / "docs/images"
_SET = """
([selector, markup]) => {
  const all = document.querySelectorAll(selector);
  const last = all[all.length - 1];
  (last.querySelector('.prose') || last).innerHTML = markup;
}
"""
_TICK = "([selector, ticked]) => { document.querySelector(selector).checked = ticked; }"
_HEAD = """
() => {
  const head = document.querySelector('#onediff_txt2img > .label-wrap');
  const rect = element => element.getBoundingClientRect();
  return {box: rect(head), status: rect(head.querySelector('#onediff_txt2img-extra')),
          arrow: rect(head.lastElementChild), title: rect(head.querySelector('span'))};
}
"""


class HostPage:
    """The WebUI's page with the panel open, its status held still.

    Args:
        page: Playwright's page.
        webui: The WebUI.
    """

    def __init__(self, page: Any, webui: WebUI) -> None:
        self.page, self._url = page, webui.url
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self, theme: str = "light", *, still: bool = True) -> None:
        """Load the page; `still` ends its questions for the status."""
        self.page.goto(f"{self._url}/?__theme={theme}", wait_until="domcontentloaded")
        self.page.wait_for_selector(f"{PANEL}-visible-checkbox", timeout=120_000)
        self.page.wait_for_timeout(3000)
        if still:
            self.page.evaluate("() => document.querySelector('#onediff_txt2img_refresh').remove()")
            self.page.wait_for_timeout(1000)

    def toggle(self, selector: str = PANEL) -> None:
        """Open or close an accordion."""
        self.page.click(f"{selector} > .label-wrap")
        self.page.wait_for_timeout(400)

    def show(self, status: Status, *, wanted: bool = True, language: str = "") -> None:
        """Put a status into the page, as the panel would."""
        words = phrases_in(language)
        reasons = [explain(r, words, dict(status.changed_by)) for r in status.reasons]
        header = header_of(status, wanted, reasons[0] if reasons else None, words)
        lines = detail_lines(status, wanted, reasons, words)
        self.page.evaluate(_TICK, [f"{PANEL}-visible-checkbox", wanted])
        self.page.evaluate(_SET, [f"{PANEL}_header", html.header(header)])
        self.page.evaluate(_SET, [f"{PANEL}_details", html.details([], lines)])

    def picture(self) -> Image.Image:
        """A picture of the accordion."""
        return Image.open(
            io.BytesIO(self.page.locator(PANEL).screenshot(animations="disabled"))
        ).convert("RGB")


@pytest.fixture(autouse=True)
def clean_start() -> None:
    """The page needs no checkpoint."""


@pytest.fixture(scope="session", autouse=True)
def graphs() -> None:
    """The page needs no graphs."""


@pytest.fixture(scope="module")
def host_page(webui: WebUI) -> Iterator[HostPage]:
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 1300, "height": 1600})
        yield HostPage(page, webui)


def test_the_header_stays_in_its_box(host_page: HostPage) -> None:
    host_page.open()
    host_page.toggle()
    page = host_page.page
    statuses = (STATES[Headline.WITHOUT], STATES[Headline.BUILDING], STATES[Headline.PART], LONG)
    for status, language in itertools.product(statuses, ("", "ja_JP", "zh_CN")):
        host_page.show(status, language=language)
        for width in (320, 480, 650, 1024, 1400, 2000):
            page.set_viewport_size({"width": width, "height": 1600})
            head = page.evaluate(_HEAD)
            where = (width, language, head)
            assert head["box"]["height"] < 60, where
            assert head["arrow"]["width"] > 0, where
            assert head["arrow"]["right"] <= head["box"]["right"] + 1, where
            assert head["status"]["right"] <= head["arrow"]["left"] + 1, where
            assert head["title"]["right"] <= head["status"]["left"] + 1, where
            if width >= 480:  # below, A1111's two columns leave a preset 92 pixels
                assert outside(page, PANEL) == [], where
    page.set_viewport_size({"width": 1300, "height": 1600})


def test_the_console_has_no_error_of_ours(host_page: HostPage) -> None:
    """A1111 itself has one for each changed side of the picture: see docs/hosts.md."""
    host_page.errors.clear()
    host_page.open(still=False)
    host_page.toggle()
    for fold in ("preset_fold", "advanced", "library", "import", "technical"):
        host_page.toggle(f"{PANEL}_{fold}")
    for name in ("add_size_0", "add_size_1", "recent_sizes", "copy_report"):
        host_page.page.click(f"{PANEL}_{name}")
        host_page.page.wait_for_timeout(1500)
    sides = [
        host_page.page.input_value(f"#txt2img_{side} input[type=number]")
        for side in ("width", "height")
    ]
    assert "x".join(sides) in host_page.page.inner_text(f"{PANEL}_sizes")  # Neo's is 1024x1024
    assert host_page.errors == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_for_the_docs(host_page: HostPage, webui: WebUI, theme: str) -> None:
    """ONEDIFF_NEW_PICTURES=1 draws them: the five headers, and the panel below the last one."""
    if not os.environ.get("ONEDIFF_NEW_PICTURES"):
        pytest.skip("ONEDIFF_NEW_PICTURES is not set")
    host_page.page.set_viewport_size({"width": 1300, "height": 1600})
    host_page.open(theme)
    shots = []
    for state in (Headline.OFF, Headline.WITHOUT, Headline.BUILDING, Headline.PART):
        host_page.show(STATES[state], wanted=state is not Headline.OFF)
        shots.append(host_page.picture())
    host_page.toggle()
    host_page.page.wait_for_timeout(3000)  # the tick's own question for the status
    host_page.show(STATES[Headline.GRAPHS])
    host_page.page.wait_for_timeout(1000)
    shots.append(host_page.picture())
    background = shots[0].getpixel((1, shots[0].height // 2))
    height = sum(shot.height + 10 for shot in shots)
    sheet = Image.new("RGB", (shots[0].width + 20, height + 10), background)
    top = 10
    for shot in shots:
        sheet.paste(shot, (10, top))
        top += shot.height + 10
    name = f"panel-{webui.get('/onediff/v1/version')['host']}-{theme}.png"
    sheet.save(DOCS / name, optimize=True)
