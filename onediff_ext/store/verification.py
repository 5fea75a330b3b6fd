"""Verification: checks every byte of the store, and deletes damaged files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onediff_ext.core.errors import GraphCorruptError, StoreError, UntrustedGraphError
from onediff_ext.store.build_history import HISTORY_FILE
from onediff_ext.store.content_hash import CONTENT_HASHES_FILE
from onediff_ext.store.durable_write import sync_folder
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.graph_file import UnknownSchemaError
from onediff_ext.store.json_records import RecordError, read_record, record_paths
from onediff_ext.store.last_kinds import LAST_KINDS_FILE
from onediff_ext.store.last_use import LAST_USE_FILE
from onediff_ext.store.saved_time import SAVED_TIME_FILE
from onediff_ext.store.stored_graph import graph_paths, open_graph
from onediff_ext.store.write_errors import mapped_write_errors

DAMAGED, OF_OTHERS, MISPLACED = "damaged", "of other versions", "misplaced"
_DELETED = "deleted"
_SHARED_RECORDS = (
    HISTORY_FILE,
    SAVED_TIME_FILE,
    LAST_KINDS_FILE,
    LAST_USE_FILE,
    CONTENT_HASHES_FILE,
)


@dataclass(frozen=True)
class StoreProblem:
    """A file of the store that this version cannot use.

    Args:
        path: The file.
        reason: What is wrong with it.
        remedy: What was done about it, such as ``"deleted"``; ``""`` for nothing.
        state: ``"damaged"`` when it is of no use to anybody; else sound, but ``"of other
            versions"`` or ``"misplaced"``.
    """

    path: Path
    reason: str
    remedy: str = ""
    state: str = DAMAGED


def find_problems(folder: StoreFolder, repair: bool) -> Iterator[StoreProblem]:
    """Check every graph and record of a store.

    Args:
        folder: The store.
        repair: Delete damaged files, move misplaced graphs, and write a damaged `schema.json`
            again.

    Yields:
        The files that this version cannot use.

    Raises:
        StoreReadOnlyError: `repair` cannot delete or move.
        UntrustedGraphError: The store's folders are not ours alone.
    """
    if not folder.exists():
        return
    yield from _schema_problem(folder, repair)
    folder.secure()
    for path in graph_paths(folder.graphs):
        try:
            open_graph(path, with_payload=True)
        except FileNotFoundError:
            continue  # another process has just removed it
        except (GraphCorruptError, UntrustedGraphError) as exc:
            removed = repair and remove_if_unusable(folder, path, with_untrusted=True)
            yield StoreProblem(path, exc.message, _DELETED * removed)
        except UnknownSchemaError as exc:
            yield StoreProblem(path, exc.message, state=OF_OTHERS)
        except OSError as exc:
            yield StoreProblem(path, f"unreadable ({exc.strerror or exc})")
    for path in _record_paths(folder):
        try:
            read_record(path)
        except FileNotFoundError:
            continue
        except RecordError as exc:
            reason = exc.message.rstrip(".").removeprefix(f"{path.name}: ")
            yield StoreProblem(path, reason, _DELETED * (repair and _delete(path)))
        except OSError as exc:
            yield StoreProblem(path, f"unreadable ({exc.strerror or exc})")
    yield from _misplaced(folder, repair)


def remove_if_unusable(folder: StoreFolder, path: Path, with_untrusted: bool = False) -> bool:
    """Delete a damaged graph file.

    The file is checked again under the guard, since another process may just have replaced it with
    a sound one.

    Args:
        folder: The store.
        path: The graph file.
        with_untrusted: Also delete a file that other users may have written.

    Returns:
        Whether the file is gone.

    Raises:
        StoreReadOnlyError: It cannot be deleted.
    """
    folder.prepare()
    with folder.locks.guard(), mapped_write_errors(path):
        try:
            open_graph(path, with_payload=True)
        except FileNotFoundError:
            return True
        except GraphCorruptError:
            return _delete(path)
        except UntrustedGraphError:
            return with_untrusted and _delete(path)
        except (UnknownSchemaError, TimeoutError):
            return False
    return False


def is_sound(path: Path) -> bool:
    """Whether `path` is a sound graph of this version that only this user can write.

    Args:
        path: The file.
    """
    try:
        open_graph(path, with_payload=True)
    except (OSError, StoreError):
        return False
    return True


def _schema_problem(folder: StoreFolder, repair: bool) -> Iterator[StoreProblem]:
    path = folder.root / "schema.json"
    if folder.is_schema_damaged:
        if repair and folder.home == folder.root:
            folder.prepare()
            yield StoreProblem(path, "damaged", "written again")
        else:
            yield StoreProblem(path, "damaged; it is written again with the next graph")


def _misplaced(folder: StoreFolder, repair: bool) -> Iterator[StoreProblem]:
    """Our graphs in `schema-1`, which is ours only while the root is another version's.

    Versions that took a flipped bit in `schema.json` for another schema went on there.
    """
    aside = folder.aside
    if folder.home == aside or aside.is_symlink():
        return
    for path in graph_paths(aside / "graphs"):
        remedy = _move_home(folder, path) if repair else ""
        yield StoreProblem(path, "kept apart while schema.json was damaged", remedy, MISPLACED)
    if repair and aside.is_dir() and not any(graph_paths(aside / "graphs")):
        shutil.rmtree(
            aside, ignore_errors=True
        )  # records and locks, which come again by themselves


def _move_home(folder: StoreFolder, path: Path) -> str:
    if remove_if_unusable(folder, path, with_untrusted=True):
        return _DELETED
    target = folder.graphs / path.name
    with folder.locks.guard(), mapped_write_errors(target):
        if not is_sound(path):
            return ""  # of another version
        if is_sound(target):
            return _DELETED * _delete(path)
        os.replace(path, target)
        sync_folder(folder.graphs)
    return "moved back"


def _record_paths(folder: StoreFolder) -> Iterator[Path]:
    for name in _SHARED_RECORDS:
        yield folder.home / name
    for records in (folder.checkpoints, folder.build_records):
        yield from record_paths(records)


def _delete(path: Path) -> bool:
    """Delete a file, pipe or link, but not a folder; return whether the name is free."""
    with mapped_write_errors(path):
        if path.is_dir() and not path.is_symlink():
            return False
        path.unlink(missing_ok=True)
    return not os.path.lexists(path)
