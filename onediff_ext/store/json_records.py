"""Reads the small JSON files of the store, which may be damaged or come from other users."""

from __future__ import annotations

import json
import os
from pathlib import Path

from onediff_ext.core.errors import StoreError, UnsafeFileError
from onediff_ext.core.untrusted_files import open_regular
from onediff_ext.store.permissions import not_ours_reason

_LIMIT_BYTES = 16 << 20
_LIMIT_S = 10.0


class RecordError(StoreError):
    """A record is damaged or has unexpected content."""


def read_record(path: Path) -> object:
    """Return the JSON value of a record.

    Args:
        path: The file.

    Raises:
        RecordError: It is damaged, not a regular file, or may come from another user.
        OSError: It is missing or cannot be read.
    """
    try:
        with open_regular(path, limit_bytes=_LIMIT_BYTES, limit_s=_LIMIT_S) as file:
            if reason := not_ours_reason(path, os.fstat(file.fileno())):
                raise RecordError(f"{path.name}: {reason}.")
            return json.loads(file.read())
    except UnsafeFileError as exc:
        raise RecordError(exc.message) from exc
    except (ValueError, RecursionError) as exc:
        raise RecordError(f"{path.name} is not a record: {exc}.") from exc


def record_paths(folder: Path) -> list[Path]:
    """Return the records of a folder, sorted; an empty list when the folder cannot be read.

    Args:
        folder: The folder of the records.
    """
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.endswith(".json"))
    except OSError:
        return []
