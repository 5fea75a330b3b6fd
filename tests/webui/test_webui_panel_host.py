"""The panel host of a WebUI: off without a GPU, what is missing, and who may import."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine import torch_versions
from onediff_ext.panel.choices import Choices
from onediff_ext.session.warm_up_report import WarmUpReport
from onediff_ext.webui.extension import Extension
from onediff_ext.webui.webui_panel_host import WebUIPanelHost


def _never() -> Extension:
    raise AssertionError("this needs no extension")


PANEL_HOST = WebUIPanelHost(_never)


def test_without_a_gpu_it_is_off_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU here" in str(PANEL_HOST.off_reason())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert PANEL_HOST.off_reason() is None


def test_missing_triton_is_said_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch_versions, "RELEASE", (2, 11))
    monkeypatch.setitem(sys.modules, "triton", None)  # as if Triton were not installed
    assert "pip install" in str(PANEL_HOST.missing_reason())
    monkeypatch.setattr(torch_versions, "RELEASE", (2, 3))
    assert "graphs need 2.8" in str(PANEL_HOST.missing_reason())


def test_import_goes_with_the_hosts_access_to_extensions(host: SimpleNamespace) -> None:
    from onediff_ext.webui.webui_panel_host import WebUIPanelHost

    panel_host = WebUIPanelHost(lambda: host.extension)
    assert panel_host.no_import_reason() is None
    host.shared.cmd_opts.disable_extension_access = True
    assert "--enable-insecure-extension-access" in (panel_host.no_import_reason() or "")


def test_build_now_builds_for_the_guidance_steps_of_the_panel(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def run(*arguments: object) -> WarmUpReport:
        given.extend(arguments)
        return WarmUpReport()

    monkeypatch.setattr(host.extension.warm_ups, "run", run)
    panel_host = WebUIPanelHost(lambda: host.extension)
    chosen = {"enabled": True, "preset": "Custom", "guidance_steps": "gate:0.4"}
    choices = Choices.parse({**chosen, "sizes": "64x64"})
    assert list(panel_host.warm_up(choices))
    assert given[0] == [BatchShape(64, 64)]
    assert given[-1] == GuidanceOptions.parse("gate:0.4")
