"""Importing the package is light, and its public names are these."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import onediff_ext

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "gradio", "diffusers", "transformers", "PIL", "numpy")

SHOW_HEAVY = f"""
import sys
print("heavy:", *[name for name in {HEAVY!r} if name in sys.modules])
"""


def heavy_after(script: str) -> list[str]:
    """Which heavy packages a fresh interpreter has loaded after a script."""
    done = subprocess.run(
        [sys.executable, "-c", script + SHOW_HEAVY],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.rpartition("heavy:")[2].split()


@pytest.mark.parametrize(
    "module",
    ["onediff_ext", "onediff_ext.core.options", "onediff_ext.core.errors", "onediff_ext.store"],
)
def test_importing_loads_nothing_heavy(module: str) -> None:
    assert heavy_after(f"import {module}") == []


@pytest.mark.parametrize(
    "module",
    [
        "onediff_ext.cli.cluster_run",
        "onediff_ext.hosts.diffusers.jobs.img2img_job",
        "onediff_ext.hosts.diffusers.jobs.run_report",
        "onediff_ext.hosts.diffusers.jobs.txt2img_results",
    ],
)
def test_the_driver_of_several_gpus_needs_no_torch(module: str) -> None:
    assert not {"torch", "diffusers", "transformers"} & set(heavy_after(f"import {module}"))


def test_reading_a_light_name_loads_nothing_heavy() -> None:
    assert heavy_after("from onediff_ext import CompileOptions, OneDiffError") == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["img2img", "--help"], ["ui", "--help"]]
)
def test_help_of_the_command_line_loads_nothing_heavy(arguments: list[str]) -> None:
    script = f"""
from onediff_ext.cli.main import main
try:
    main({arguments!r})
except SystemExit as exc:
    assert not exc.code, exc.code
"""
    assert heavy_after(script) == []


def test_pictures_load_no_torch() -> None:
    script = "import pkgutil, importlib, onediff_ext.pictures as package\n" + (
        "for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
    )
    assert not {"torch", "gradio", "diffusers", "transformers"} & set(heavy_after(script))


def test_public_names() -> None:
    assert onediff_ext.__all__ == [
        "CompileOptions",
        "OneDiffError",
        "__version__",
        "compile_module",
        "compile_pipe",
        "compiled",
        "load_checkpoint",
        "load_pipe",
        "oneflow_compile",
        "save_pipe",
        "undo_compile",
    ]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'compile_pip'"):
        _ = onediff_ext.compile_pip


def test_each_public_name_resolves() -> None:
    pytest.importorskip("diffusers", reason="the diffusers host needs diffusers")
    script = "import onediff_ext\nfor name in onediff_ext.__all__: getattr(onediff_ext, name)"
    assert "torch" in heavy_after(script)


def test_no_file_of_the_package_is_long() -> None:
    """A file of more than 400 lines holds more than one idea (CONTRIBUTING.md)."""
    files = (ROOT / "onediff_ext").rglob("*.py")
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert len(lines) > 300
    assert {str(path): count for path, count in lines.items() if count > 400} == {}
