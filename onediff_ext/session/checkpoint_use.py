"""Which kinds the checkpoint in use consists of, kept for the next start."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from onediff_ext.core.errors import StoreError
from onediff_ext.engine.blocks.block_kind import BlockKind, KindState
from onediff_ext.store import CheckpointRecords
from onediff_ext.store.folder import StoreFolder

logger = logging.getLogger(__name__)


class CheckpointUse:
    """One checkpoint of one session.

    Args:
        folder: The store.
        content_hash, name, path, architecture: As in `CheckpointRecords.record`.
    """

    def __init__(
        self, folder: StoreFolder, content_hash: str, *, name: str, path: str, architecture: str
    ) -> None:
        self.content_hash, self.name = content_hash, name
        self._path, self._architecture = path, architecture
        self._records = CheckpointRecords(folder)
        self._recorded: dict[str, int] = {}

    def record(self, kinds: Sequence[BlockKind]) -> None:
        """Write down the kinds that have or will have a graph, if there are new ones.

        It only serves the next start, and `graphs list`: a store that one may only read serves
        all the same.
        """
        usable = [kind for kind in kinds if kind.state is not KindState.FAILED]
        counts = {kind.key.digest: len(kind.blocks) for kind in usable}
        if not counts or counts.items() <= self._recorded.items():
            return
        self._recorded = counts
        try:
            self._records.record(
                self.content_hash,
                name=self.name,
                path=self._path,
                architecture=self._architecture,
                kinds=counts,
            )
        except StoreError as exc:
            logger.info("The checkpoint's record is not kept: %s", exc)
