"""The result of one export."""

from __future__ import annotations

from dataclasses import dataclass

from onediff_ext.core.errors import OneDiffError
from onediff_ext.engine.blocks.block_kind import BlockKind


@dataclass(frozen=True)
class ExportResult:
    """One kind's exported program, or the reason why there is none.

    Args:
        kind: The kind.
        program: The program as `torch.export.save` writes it, or None.
        error: Why there is no program, or None.
    """

    kind: BlockKind
    program: bytes | None
    error: OneDiffError | None = None
