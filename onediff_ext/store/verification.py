"""Checking every byte of what is stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import GraphCorruptError
from .container import UnknownSchemaError
from .folder import StoreFolder
from .stored_graph import graph_paths, open_graph
from .write_errors import mapped_write_errors


@dataclass(frozen=True)
class StoreProblem:
    """A file among the graphs that is not a sound graph of this version.

    Args:
        path: The file.
        reason: What is wrong with it.
        removed: Whether it was deleted.
    """

    path: Path
    reason: str
    removed: bool


def find_problems(folder: StoreFolder, repair: bool) -> Iterator[StoreProblem]:
    """Check every graph; with `repair`, delete the damaged ones.

    Raises:
        StoreReadOnlyError: `repair` cannot delete.
    """
    for path in graph_paths(folder.graphs):
        try:
            open_graph(path, with_payload=True)
        except FileNotFoundError:
            continue  # just removed by somebody else
        except GraphCorruptError as exc:
            yield StoreProblem(path, exc.message, repair and remove_if_corrupt(folder, path))
        except UnknownSchemaError as exc:
            yield StoreProblem(path, exc.message, False)
        except OSError as exc:
            yield StoreProblem(path, f"unreadable ({exc.strerror or exc})", False)


def remove_if_corrupt(folder: StoreFolder, path: Path) -> bool:
    """Delete a graph file that is damaged; return whether it is gone.

    It is looked at again under the guard, since another process may just have
    replaced it by a sound one.

    Raises:
        StoreReadOnlyError: It cannot be deleted.
    """
    folder.prepare()
    with folder.locks.guard(), mapped_write_errors(path):
        try:
            open_graph(path, with_payload=True)
        except FileNotFoundError:
            return True
        except UnknownSchemaError:
            return False
        except GraphCorruptError:
            path.unlink(missing_ok=True)
            return True
    return False


def is_sound(path: Path) -> bool:
    """Whether `path` is a sound graph of this version."""
    try:
        open_graph(path, with_payload=True)
    except (OSError, GraphCorruptError, UnknownSchemaError):
        return False
    return True
