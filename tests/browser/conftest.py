"""The panel's page, served by each Gradio that ONEDIFF_GRADIO_PYTHONS names, and by our own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import browser
from tests.support.panel_page import PanelPage

ROOT = Path(__file__).resolve().parents[2]
_START_S = 120.0


def _pythons() -> list[str]:
    named = os.environ.get("ONEDIFF_GRADIO_PYTHONS", "")
    return [sys.executable, *filter(None, named.split(os.pathsep))]


@pytest.fixture(scope="module", params=_pythons(), ids=lambda path: Path(path).parts[-3])
def panel_page(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PanelPage]:
    """The page, served by one Gradio and open in a browser."""
    pytest.importorskip("gradio", reason="the panel needs gradio, which is not installed")
    python = request.param
    with browser() as chromium:
        folder = tmp_path_factory.mktemp("panel")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRADIO_ANALYTICS_ENABLED": "False"}
        version = subprocess.run(
            [python, "-c", "from importlib.metadata import version; print(version('gradio'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        with (folder / "log.txt").open("w") as log:
            server = subprocess.Popen(
                [python, str(Path(__file__).with_name("served_panel.py")), str(folder), str(port)],
                env=environment,
                stdout=log,
                stderr=log,
            )
        try:
            (folder / "url.txt").write_text(f"http://127.0.0.1:{port}/")
            _wait_for(f"http://127.0.0.1:{port}/", server, folder / "log.txt")
            page = chromium.new_page()
            yield PanelPage(page, folder, version)
        finally:
            server.kill()
            server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    ends_at = time.monotonic() + _START_S
    while time.monotonic() < ends_at:
        if server.poll() is not None:
            raise AssertionError(f"the page ended: {log.read_text()[-2000:]}")
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except OSError:
            time.sleep(0.3)
    raise AssertionError(f"the page did not start: {log.read_text()[-2000:]}")
