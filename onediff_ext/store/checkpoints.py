"""Checkpoint records: which kinds each checkpoint uses, in one small file per checkpoint."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onediff_ext.core.errors import OptionError, StoreError
from onediff_ext.core.records import CheckpointRecord, KindUse
from onediff_ext.store.atomic_write import publish
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.json_records import read_record, record_paths
from onediff_ext.store.stored_graph import graph_path, is_digest
from onediff_ext.store.write_errors import mapped_write_errors

_LOG = logging.getLogger(__name__)
_LOCK_TIMEOUT_S = 10.0
# Each update of torch gives a checkpoint some 20 new kinds. The oldest are forgotten.
MAX_KINDS = 512


@dataclass(frozen=True)
class CheckpointListing:
    """A checkpoint's record, compared with the stored graphs.

    Args:
        record: As it was last written.
        missing: Digests of its kinds without a stored graph.
    """

    record: CheckpointRecord
    missing: tuple[str, ...]


class CheckpointRecords:
    """The checkpoint records of one store.

    Args:
        folder: The store, e.g. `GraphLibrary.folder`.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self.folder = folder

    def record(
        self,
        content_hash: str,
        *,
        name: str,
        path: str,
        architecture: str,
        kinds: Mapping[str, int],
        now_s: float | None = None,
    ) -> CheckpointRecord:
        """Record that a checkpoint uses some kinds now, and keep the earlier ones.

        Args:
            content_hash: Of the checkpoint, 64 hexadecimal digits.
            name, path, architecture: As in `CheckpointRecord`.
            kinds: Digest of a kind → number of blocks.
            now_s: Seconds since the epoch; None asks the clock.

        Returns:
            The merged record. It is written even when only the time has changed.

        Raises:
            OptionError: A hash or digest does not have 64 hexadecimal digits.
            StoreFullError, StoreReadOnlyError, StoreBusyError: It cannot be written.
        """
        target = self._path(content_hash)
        for digest in kinds:
            graph_path(self.folder.graphs, digest)  # raises OptionError for anything but a digest
        now_s = time.time() if now_s is None else now_s
        self.folder.prepare()
        with self.folder.locks.hold(f"checkpoint-{content_hash}", _LOCK_TIMEOUT_S):
            earlier = self._read_or_forget(target)
            merged = {**earlier.kinds} if earlier else {}
            merged.update({digest: KindUse(count, now_s) for digest, count in kinds.items()})
            latest = sorted(merged.items(), key=lambda item: (-item[1].last_used_at, item[0]))
            record = CheckpointRecord(
                content_hash=content_hash,
                name=name,
                path=path,
                architecture=architecture,
                kinds=dict(latest[:MAX_KINDS]),
            )
            text = json.dumps(record.to_json(), indent=1, sort_keys=True)
            publish(self.folder, target, [text.encode("ascii")])
        return record

    def read(self, content_hash: str) -> CheckpointRecord | None:
        """Return a checkpoint's record; None when there is none.

        Args:
            content_hash: Of the checkpoint, 64 hexadecimal digits.

        Raises:
            OptionError: The hash does not have 64 hexadecimal digits.
            StoreError: It is damaged, or of another version.
        """
        return self._read(self._path(content_hash))

    def kinds_by_use(self, content_hash: str) -> Sequence[str]:
        """Return the digests of a checkpoint's kinds, those of most blocks first.

        Args:
            content_hash: Of the checkpoint, 64 hexadecimal digits.

        Raises:
            OptionError, StoreError: As `read`.
        """
        record = self.read(content_hash)
        if record is None:
            return ()
        return sorted(record.kinds, key=lambda digest: -record.kinds[digest].block_count)

    def list(self) -> list[CheckpointListing]:
        """Return the checkpoints by name. Unreadable records are left out."""
        found = []
        for path in record_paths(self.folder.checkpoints):
            try:
                record = self._read(path)
            except StoreError as exc:
                _LOG.warning("Checkpoint record %s is left out: %s", path.name, exc)
                continue
            if record is not None:
                found.append(CheckpointListing(record, self._missing(record)))
        return sorted(found, key=lambda seen: (seen.record.name, seen.record.content_hash))

    def delete(self, content_hash: str) -> bool:
        """Delete a checkpoint's record, but not its graphs.

        Args:
            content_hash: Of the checkpoint, 64 hexadecimal digits.

        Returns:
            Whether there was a record.

        Raises:
            OptionError: The hash does not have 64 hexadecimal digits.
            StoreReadOnlyError: The folder cannot be written.
        """
        path = self._path(content_hash)
        with mapped_write_errors(path):
            try:
                path.unlink()
            except FileNotFoundError:
                return False
        return True

    def _path(self, content_hash: str) -> Path:
        if not is_digest(content_hash):
            raise OptionError(
                f"{content_hash!r} is not a checkpoint's content hash.",
                "A content hash has 64 hexadecimal digits.",
            )
        return self.folder.checkpoints / f"{content_hash}.json"

    def _read(self, path: Path) -> CheckpointRecord | None:
        hint = "Delete the record; it is written again when the checkpoint is used."
        try:
            record = CheckpointRecord.from_json(read_record(path))
        except FileNotFoundError:
            return None
        except StoreError as exc:
            raise StoreError(f"{path.name}: {exc.message}", hint) from exc
        except OSError as exc:
            raise StoreError(f"{path.name} cannot be read ({exc.strerror or exc}).", hint) from exc
        if record.content_hash != path.stem:
            raise StoreError(f"{path.name} is the record of another checkpoint.", hint)
        return record

    def _read_or_forget(self, path: Path) -> CheckpointRecord | None:
        try:
            return self._read(path)
        except StoreError as exc:
            _LOG.warning("A new checkpoint record is started: %s", exc)
            return None

    def _missing(self, record: CheckpointRecord) -> tuple[str, ...]:
        return tuple(
            digest
            for digest in sorted(record.kinds)
            if not (is_digest(digest) and graph_path(self.folder.graphs, digest).exists())
        )
