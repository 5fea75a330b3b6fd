"""What the panel is told before anything is drawn: off without a GPU, and what is missing."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from onediff_ext.engine import torch_versions
from onediff_ext.webui.extension import Extension
from onediff_ext.webui.webui_panel_host import WebUIPanelHost


def _never() -> Extension:
    raise AssertionError("nothing of the host is needed for this")


PORT = WebUIPanelHost(_never)


def test_without_a_gpu_it_is_off_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU here" in str(PORT.off_reason())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert PORT.off_reason() is None


def test_missing_triton_is_said_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch_versions, "RELEASE", (2, 11))
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    assert "pip install" in str(PORT.missing_reason())
    monkeypatch.setattr(torch_versions, "RELEASE", (2, 3))
    assert "graphs need 2.8" in str(PORT.missing_reason())


def test_import_goes_with_the_hosts_access_to_extensions(host: SimpleNamespace) -> None:
    from onediff_ext.webui.webui_panel_host import WebUIPanelHost

    port = WebUIPanelHost(lambda: host.extension)
    assert port.why_no_import() is None
    host.shared.cmd_opts.disable_extension_access = True
    assert "--enable-insecure-extension-access" in (port.why_no_import() or "")
