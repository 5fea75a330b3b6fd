"""`onediff-ext ui`, as far as it goes without a page; and nothing of gradio before it is needed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onediff_ext.cli.main import main
from onediff_ext.core.demo_files import DEMO_MODEL
from onediff_ext.standalone.checkpoint_list import known_models

ROOT = Path(__file__).resolve().parents[2]


def test_without_gradio_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec

    def without_gradio(name: str, *more: Any) -> Any:
        return None if name == "gradio" else real(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without_gradio)
    assert main(["ui", "--no-browser"]) == 2
    said = capsys.readouterr().err
    assert "needs the package gradio" in said
    assert "onediff-ext[ui]" in said


def test_the_table_of_choices_loads_neither_gradio_nor_torch() -> None:
    script = """
import sys
import onediff_ext.panel.choices, onediff_ext.panel.field_schema, onediff_ext.panel.html
import onediff_ext.panel.panel_host, onediff_ext.panel.infotext_entries
import onediff_ext.panel.library_actions, onediff_ext.webui.settings
import onediff_ext.webui.batch_job
assert not {"gradio", "torch", "modules"} & set(sys.modules)
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environ)


def test_checkpoints_beside_the_current_one_are_offered_and_the_demo(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors", "my-lora.safetensors", "notes.txt"):
        (tmp_path / name).touch()
    found = known_models(tmp_path / "b.safetensors")
    assert found == [
        str(tmp_path / "b.safetensors"),
        str(tmp_path / "a.safetensors"),
        *([str(DEMO_MODEL)] if DEMO_MODEL.exists() else []),
    ]
