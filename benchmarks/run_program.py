"""Runs a program, such as a WebUI's launcher, within this process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def run_program(arguments: Sequence[str]) -> None:
    """Run a program as ``python PROGRAM.py ARGUMENT …`` would.

    Args:
        arguments: The program's path, and its arguments.
    """
    sys.argv = list(arguments)
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")
