"""A warm-up of the stand-alone page lets whoever wants a picture go first."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="the page draws with diffusers, which is not installed")

import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.hosts.diffusers.ldm_layout import save_ldm
from onediff_ext.ui.choices import Choices
from onediff_ext.ui.standalone.port import StudioPort
from onediff_ext.ui.standalone.studio import Studio
from tests import models


def test_a_picture_goes_first_and_the_warm_up_goes_on(tmp_path: Path) -> None:
    model = save_ldm(models.sd15(), tmp_path / "small.safetensors")
    options = CompileOptions(store=tmp_path / "store", workers=1)
    studio = Studio(torch.device("cpu"), torch.float32, options)
    studio.load(model)
    port = StudioPort(studio, tmp_path / "out")
    choices = Choices.parse(
        {"enabled": True, "preset": "Custom", "backend": "eager", "vae": "ignore all",
         "sizes": "64x64, 72x64"}
    )  # fmt: skip
    had_its_turn = threading.Event()
    over = threading.Event()

    def picture() -> None:
        with studio.turn():
            assert not over.is_set()
            had_its_turn.set()

    thread = threading.Thread(target=picture, daemon=True)
    started = False
    summary = ""
    for step in port.warm_up(choices):
        if step.note.startswith("building") and not started:
            started = True
            thread.start()
        summary = step.summary or summary
    over.set()
    thread.join(10)
    assert started
    assert had_its_turn.is_set()
    assert summary.startswith("2 sizes, ")
    assert "cancelled" not in summary
    assert not studio.is_waited_for()
