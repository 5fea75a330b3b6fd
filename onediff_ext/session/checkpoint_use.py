"""Records which kinds the checkpoint in use consists of, for the next start."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from onediff_ext.core.errors import StoreError
from onediff_ext.engine.blocks.block_kind import BlockKind, KindState
from onediff_ext.store import CheckpointRecords
from onediff_ext.store.folder import StoreFolder

logger = logging.getLogger(__name__)


class CheckpointUse:
    """A checkpoint that one session draws with.

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

    def recorded_kinds(self) -> Sequence[str]:
        """Return the digests of the kinds that earlier starts have used, as
        `CheckpointRecords.kinds_by_use`."""
        return self._records.kinds_by_use(self.content_hash)

    def record(self, kinds: Sequence[BlockKind]) -> None:
        """Record the kinds that have or will have a graph, if there are new ones.

        Only the next start and `graphs list` read the record, so a store that cannot be written is
        no error.

        Args:
            kinds: The checkpoint's kinds; failed ones are left out.
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
            logger.info("The checkpoint's record is not written: %s", exc)
