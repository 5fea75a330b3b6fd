"""A real browser: Debian's Chromium, driven by Playwright, with axe for accessibility."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops, ImageStat

# Letters differ a little from machine to machine; colours, boxes and their places do not.
_SHARE_OF_SIZE = 0.04
_MEAN_DIFFERENCE = 6.0  # of 255, at a third of the size

# What Gradio's own components break, in each version that was seen. Our HTML breaks none.
GRADIOS_OWN_RULES = frozenset(
    {
        "aria-allowed-role",
        "aria-input-field-name",
        "aria-required-children",
        "aria-toggle-field-name",
        "button-name",
        "color-contrast",
        "label",
        "label-title-only",
        "nested-interactive",
        "region",
        "select-name",
    }
)
_OUTSIDE = """
([selector]) => {
  const box = document.querySelector(selector).getBoundingClientRect();
  const cut = element => {
    for (let up = element.parentElement; up; up = up.parentElement) {
      if (getComputedStyle(up).overflowX !== 'visible') return true;
    }
    return false;
  };
  return [...document.querySelectorAll(selector + ' *')].filter(element => {
    const own = element.getBoundingClientRect();
    const isShown = element.offsetParent && own.width && own.height;
    return isShown && (own.right > box.right + 1 || own.left < box.left - 1) && !cut(element);
  }).map(element => `${element.tagName}#${element.id}.${element.className}`);
}
"""


@contextmanager
def browser() -> Iterator[Any]:
    """A browser; skips the test where Playwright or Chromium is missing."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


def outside(page: Any, selector: str) -> list[str]:
    """The elements that stand out of a box to the left or right, and are not cut there."""
    found: list[str] = page.evaluate(_OUTSIDE, [selector])
    return found


def axe_violations(page: Any, selector: str, *, without: frozenset[str] = frozenset()) -> list[str]:
    """The accessibility rules that a part of the page breaks, with an element of each.

    Args:
        page: Playwright's page.
        selector: The part.
        without: Rules that are left out.
    """
    pytest.importorskip(
        "axe_playwright_python",
        reason="axe is not installed (pip install axe-playwright-python)",
    )
    axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    page.evaluate(axe)
    result = page.evaluate("selector => axe.run(selector)", selector)
    return [
        f"{broken['id']}: {broken['nodes'][0]['html'][:200]}"
        for broken in result["violations"]
        if broken["id"] not in without
    ]


def assert_looks_like(screenshot: bytes, reference: Path) -> None:
    """Compare a screenshot with a reference within a tolerance.

    Args:
        screenshot: A PNG.
        reference: The file, a third as large; ONEDIFF_NEW_PICTURES=1 writes it.
    """
    shot = Image.open(io.BytesIO(screenshot)).convert("RGB")
    small = shot.resize((shot.width // 3, shot.height // 3), Image.Resampling.LANCZOS)
    if os.environ.get("ONEDIFF_NEW_PICTURES"):
        reference.parent.mkdir(exist_ok=True)
        small.quantize(64).save(reference, optimize=True)
        return
    expected = Image.open(reference).convert("RGB")
    for side, wanted in zip(small.size, expected.size, strict=True):
        assert abs(side - wanted) <= _SHARE_OF_SIZE * wanted, (small.size, expected.size)
    difference = ImageChops.difference(small.resize(expected.size), expected)
    mean = sum(ImageStat.Stat(difference).mean) / 3
    assert mean <= _MEAN_DIFFERENCE, f"{reference.name}: {mean:.1f} of 255"
