"""Shared steps of build tests: draw until everything is built, look at the records."""

from __future__ import annotations

from collections.abc import Callable

import torch

from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.session.session import Session

_TIMEOUT_S = 240


def draw_all(session: Session, draw: Callable[[], torch.Tensor], rounds: int = 3) -> torch.Tensor:
    """Draw and build until nothing is left to build; returns the last forward."""
    for _ in range(rounds):
        output = draw()
        assert session.wait_for_builds(_TIMEOUT_S)
    return output


def nothing_is_held_against_a_kind(session: Session) -> bool:
    """Whether the store remembers no failure and no bad graph."""
    records = session.build_context.build_records
    digests = [kind.key.digest for kind in session.kinds]
    checks = [check for digest in digests for check in records.read(digest).load_checks.values()]
    return not list(records.failures()) and not any(check.problem for check in checks)


def forget_load_check(session: Session, kind: BlockKind, payload: bytes | None = None) -> None:
    """Make a stored graph one that another machine has built.

    Args:
        session: Of the store.
        kind: The graph's kind.
        payload: Replaces the graph's bytes.
    """
    stored = session.library.get(kind.key)
    assert stored is not None
    assert stored.payload is not None
    (session.library.folder.build_records / f"{kind.key.digest}.json").unlink()
    session.library.put(
        kind.key,
        payload or stored.payload,
        label=kind.label,
        backend="eager",
        build_seconds=1,
        details={},
    )
