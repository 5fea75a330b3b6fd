"""Exported programs that all processes of a test run share: each kind is traced once.

A program holds no weights, and its kind's digest names all that decides it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onediff_ext.engine.blocks.block_kind import BlockKind

FOLDER_VARIABLE = "ONEDIFF_TEST_EXPORTS"
"""In the environment: the folder of the run, which `tests/conftest.py` makes."""


@contextlib.contextmanager
def kept_exports() -> Iterator[None]:
    """Within the block, kinds that come into being are exported only if no test has done it yet.

    The copy of a block is made all the same, so a block that is gone or has changed is noticed.
    Outside of a test run, such as in ``python -m tests.differential``, nothing is kept.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if not named:
        yield
        return
    folder, slow = Path(named), BlockKind.__init__

    def init(kind: BlockKind, *arguments: Any, **more: Any) -> None:
        slow(kind, *arguments, **more)
        prepare = kind.prepare_export

        def prepare_export(device: torch.device) -> Callable[[], bytes]:
            export = prepare(device)
            path = folder / f"{kind.key.digest}-{device.type}"

            def export_once() -> bytes:
                with contextlib.suppress(FileNotFoundError):
                    return path.read_bytes()
                program = export()
                part = path.with_name(f"{secrets.token_hex(8)}.part")
                part.write_bytes(program)
                part.replace(path)
                return program

            return export_once

        kind.prepare_export = prepare_export

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockKind, "__init__", init)
        yield
