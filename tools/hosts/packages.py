"""A virtual environment for a WebUI, with the packages that it asks for."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.hosts.webuis import SETUPTOOLS, TORCH, WebUI

# https://…/NAME-VERSION-py3-none-any.whl
_WHEEL = re.compile(r"^https?://\S*/(?P<name>[^/-]+)-(?P<version>[^/-]+)-[^/]+\.whl$")
_NAME = re.compile(r"[^\w.-]")


def make_environment(webui: WebUI, checkout: Path, python: str) -> Path:
    """Make a virtual environment in a checkout and install what the WebUI needs.

    Options for pip may stand in ``ONEDIFF_PIP_ARGS``, such as an index with CPU builds of PyTorch.

    Args:
        webui: The WebUI.
        checkout: Its folder.
        python: The interpreter that the environment is made from.

    Returns:
        The environment's interpreter.

    Raises:
        subprocess.CalledProcessError: venv or pip failed; its output is on the console.
    """
    folder = checkout / "venv"
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    wanted = checkout / "tmp" / "onediff-requirements.txt"
    wanted.parent.mkdir(exist_ok=True)
    listed = (checkout / webui.requirements).read_text(encoding="utf-8").splitlines()
    wanted.write_text("\n".join(requirements(listed)) + "\n", encoding="utf-8")
    _pip(interpreter, *TORCH)
    # One after another: Neo's list wants another Pillow than the gradio that Neo installs first.
    _pip(interpreter, *webui.packages)
    _pip(interpreter, "-r", str(wanted))
    _pip(interpreter, "--no-deps", SETUPTOOLS)
    return interpreter


def requirements(lines: Iterable[str]) -> Iterator[str]:
    """Return a WebUI's list of packages as pip takes it from an index.

    A wheel of a project's releases is asked for by name and version. PyTorch is left out, since
    its version is chosen for all test hosts, and setuptools, since PyTorch and the WebUIs name
    versions that exclude each other.

    Args:
        lines: The lines of its file.
    """
    for line in lines:
        wanted = line.split("#")[0].strip()
        wheel = _WHEEL.match(wanted)
        if wheel is not None:
            yield f"{wheel['name']}=={wheel['version']}"
        elif wanted and _NAME.split(wanted)[0] not in ("torch", "setuptools"):
            yield wanted


def _pip(interpreter: Path, *wanted: str) -> None:
    options = shlex.split(os.environ.get("ONEDIFF_PIP_ARGS", ""))
    subprocess.run(
        [str(interpreter), "-m", "pip", "install", "--prefer-binary", *options, *wanted],
        check=True,
    )
