"""Reading the small JSON files of the store, whatever has become of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from onediff_ext.core.errors import StoreError, UnsafeFileError
from onediff_ext.core.untrusted_files import open_regular
from onediff_ext.store.permissions import why_not_ours

_LIMIT_BYTES = 16 << 20
_LIMIT_S = 10.0


class RecordError(StoreError):
    """A record cannot be read or does not say what such a record says."""


def read_record(path: Path) -> object:
    """Return the JSON value of a record.

    Raises:
        RecordError: It is damaged, no regular file, or may come from somebody else.
        OSError: There is none, or it cannot be read.
    """
    try:
        with open_regular(path, limit_bytes=_LIMIT_BYTES, limit_s=_LIMIT_S) as file:
            if reason := why_not_ours(path, os.fstat(file.fileno())):
                raise RecordError(f"{path.name}: {reason}.")
            return json.loads(file.read())
    except UnsafeFileError as exc:
        raise RecordError(exc.message) from exc
    except (ValueError, RecursionError) as exc:
        raise RecordError(f"{path.name} is no record: {exc}.") from exc


def record_paths(folder: Path) -> list[Path]:
    """The records of a folder, sorted; none when the folder cannot be read."""
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.endswith(".json"))
    except OSError:
        return []
