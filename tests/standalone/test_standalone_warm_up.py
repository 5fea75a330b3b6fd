"""A warm-up of the stand-alone page lets drawing go first."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the page needs gradio, which is not installed")
pytest.importorskip("diffusers", reason="the page draws with diffusers, which is not installed")

import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.hosts.diffusers.checkpoints.ldm_saving import save_ldm
from onediff_ext.panel.choices import Choices
from onediff_ext.standalone import standalone_panel_host as host_module
from onediff_ext.standalone.app import StandaloneApp
from onediff_ext.standalone.standalone_panel_host import StandalonePanelHost
from tests.support import models


def test_a_picture_goes_first_and_the_warm_up_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[list[BatchShape]] = []
    made = host_module.pipe_warm_up

    def counted(pipe: Any, shapes: list[BatchShape], **more: Any) -> Any:
        passes.append(list(shapes))
        assert str(more["guidance_steps"]) == "gate:0.4"
        return made(pipe, shapes, **more)

    monkeypatch.setattr(host_module, "pipe_warm_up", counted)
    model = save_ldm(models.sd15(), tmp_path / "small.safetensors")
    options = CompileOptions(store=tmp_path / "store", workers=1)
    standalone_app = StandaloneApp(torch.device("cpu"), "auto", options)
    standalone_app.load(model)
    panel_host = StandalonePanelHost(standalone_app, tmp_path / "out")
    choices = Choices.parse(
        {"enabled": True, "preset": "Custom", "backend": "eager", "vae": "ignore all",
         "sizes": "64x64, 72x64", "guidance_steps": "gate:0.4"}
    )  # fmt: skip
    had_its_turn = threading.Event()

    def picture() -> None:
        with standalone_app.turn():
            had_its_turn.set()

    thread = threading.Thread(target=picture, daemon=True)
    started = False
    summary = ""
    for result in panel_host.warm_up(choices):
        if not started and (panel_host.status().building or panel_host.status().stage):
            started = True
            thread.start()
        summary = result or summary
    assert started
    assert had_its_turn.wait(60)
    assert len(passes) > 1
    assert summary.startswith("Ready: 2 sizes. ")
    assert "cancelled" not in summary.lower()
    assert not panel_host.status().warming_up
    assert not standalone_app.is_waited_for()
