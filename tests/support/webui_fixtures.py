"""A stand-in for the host, in place before our own modules that need it are imported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.webui_stand_in import EagerHost, install_modules


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The stand-in, with our extension on an `EagerHost`."""
    pytest.importorskip("gradio", reason="the extension needs gradio, which is not installed")
    found = install_modules(monkeypatch, onediff_store=str(tmp_path / "store"))
    from onediff_ext.webui import extension

    found.adapter = EagerHost()
    found.extension = extension.Extension(found.adapter, found.shared.opts)
    monkeypatch.setattr(extension, "_current", found.extension)
    return found
