"""Exported programs that test runs share and keep: each kind is traced once.

A program holds no weights. Its kind's digest and the sources of the exporter name all that decides
it (`tests.support.kept_folders`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._export.serde import serialize

from onediff_ext.engine.blocks.block_kind import BlockKind
from tests.support.kept_folders import EXPORTS_VARIABLE

_DIGEST_BYTES = 32


@contextlib.contextmanager
def kept_exports() -> Iterator[None]:
    """Within the block, kinds that come into being are exported only if no test has done it yet.

    The copy of a block is made all the same, so a block that is gone or has changed is noticed.
    Programs are saved without torch's rehearsal of a form that it then drops.
    Outside of a test run, such as in ``python -m tests.differential``, nothing is kept.
    """
    named = os.environ.get(EXPORTS_VARIABLE)
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
                program = read_bytes(path)
                if program is None:
                    program = export()
                    keep_bytes(path, program)
                return program

            return export_once

        kind.prepare_export = prepare_export

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockKind, "__init__", init)
        # Tests with a process of their own, and those of the exporter, save as always.
        patch.setattr(serialize, "canonicalize", lambda program, constants=None: program)
        yield


def read_bytes(path: Path) -> bytes | None:
    """Return what was kept; None where there is nothing, or only a part after a power cut."""
    try:
        kept = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, content = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


def keep_bytes(path: Path, content: bytes) -> None:
    """Keep bytes for other processes and later runs."""
    part = path.with_name(f"{secrets.token_hex(8)}.part")
    part.parent.mkdir(exist_ok=True)  # another run may drop the folder
    part.write_bytes(hashlib.sha256(content).digest() + content)
    part.replace(path)
