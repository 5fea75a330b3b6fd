"""What installs Triton, and that nothing does so by itself."""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch

from onediff_ext.backends.inductor import triton_package
from onediff_ext.backends.inductor.backend import InductorBackend
from onediff_ext.backends.inductor.triton_package import install_command, missing_reason
from onediff_ext.engine.torch_versions import RELEASE

ROOT = Path(__file__).resolve().parents[3]
builds_graphs = pytest.mark.skipif(
    RELEASE < (2, 6), reason=f"torch {torch.__version__} builds no graphs, with or without Triton"
)


@pytest.mark.parametrize(
    ("release", "platform", "package"),
    [
        ((2, 6), "win32", '"triton-windows<3.3"'),
        ((2, 7), "win32", '"triton-windows<3.4"'),
        ((2, 8), "win32", '"triton-windows<3.5"'),
        ((2, 10), "win32", '"triton-windows<3.7"'),
        ((2, 10), "linux", '"triton<3.7"'),
        ((2, 99), "win32", "triton-windows"),
    ],
)
def test_the_command_names_the_triton_of_each_torch(
    release: tuple[int, int], platform: str, package: str
) -> None:
    assert install_command(release, platform, "python") == f"python -m pip install {package}"


def test_the_command_names_the_webuis_own_python() -> None:
    command = install_command((2, 6), "win32", r"C:\sd webui\venv\python.exe")
    assert command.startswith('"C:\\sd webui\\venv\\python.exe" -m pip install ')


@builds_graphs
def test_missing_triton_is_said_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    monkeypatch.setattr(triton_package.sys, "platform", "win32")
    reason = missing_reason()
    assert reason is not None
    assert reason.startswith(f"Triton is missing: {sys.executable} -m pip install")
    assert "triton-windows" in reason
    if RELEASE >= (2, 8):
        assert InductorBackend().unavailable_reason(torch.device("cuda")) == reason
    assert InductorBackend().unavailable_reason(torch.device("cpu")) is None


@builds_graphs
def test_this_torch_asks_for_the_triton_that_is_noted() -> None:
    asked = [r for r in requires("torch") or () if re.match(r"triton\b", r)]
    if not asked:
        pytest.skip(f"this build of torch {torch.__version__} names no Triton")
    major, minor = re.search(r"==(\d+)\.(\d+)", asked[0]).groups()
    assert f'"triton<{major}.{int(minor) + 1}"' in install_command(RELEASE, "linux", "python")


@pytest.mark.parametrize("file", ["install.py", "pyproject.toml"])
def test_nothing_installs_triton_by_itself(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert "triton-windows" not in text
    assert not re.search(r"""["']triton[=<>~"']""", text)
