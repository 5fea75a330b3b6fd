"""A graph exchange in a folder of this user's: native code of others is not taken from it."""

from __future__ import annotations

import os
from pathlib import Path

from onediff_ext.core.errors import UntrustedGraphError
from onediff_ext.core.untrusted_files import open_regular
from onediff_ext.store.fsspec_exchange import FsspecExchange
from onediff_ext.store.permissions import not_ours_reason, secure_folder
from onediff_ext.store.stored_graph import MAX_GRAPH_BYTES

_FETCH_S = 300.0
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)


class FolderExchange(FsspecExchange):
    """Graphs and leases in a folder that is held to the rules of a store.

    Each machine checks the folders and the graph's file when it fetches: it may see other owners
    than the machine that opened the exchange, and others may have left files in the folder while it
    was open to them.

    Args:
        folder: The whole path. It is made when it is first written to.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = Path(self._root)

    def fetch(self, tag: str, digest: str) -> bytes | None:
        """Return a graph file, or None when there is none.

        Args:
            tag: The machine tag.
            digest: Of the kind's key.

        Raises:
            UntrustedGraphError: Others own or may write it, or a folder above it.
            UnsafeFileError: It is no regular file, or larger or slower than any graph.
            OSError: It cannot be read.
        """
        path = Path(self._graph(tag, digest))
        for folder in (self._folder, path.parent.parent, path.parent):
            secure_folder(folder, holds_code=True)
        try:
            file = open_regular(path, limit_bytes=MAX_GRAPH_BYTES, limit_s=_FETCH_S)
        except FileNotFoundError:
            return None
        with file:
            if reason := not_ours_reason(path, os.fstat(file.fileno())):
                hint = f"If you trust it, own it alone: `chmod go-w '{path}'`; else delete it."
                raise UntrustedGraphError(f"{path}: {reason}.", hint)
            return file.read()

    def _make_folder(self, folder: str) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = self._folder
        for name in Path(folder).relative_to(self._folder).parts:
            made /= name
            made.mkdir(mode=0o700, exist_ok=True)

    def _put(self, path: str, content: bytes) -> None:
        self._make_folder(path.rpartition("/")[0])
        with os.fdopen(os.open(path, _FLAGS, 0o600), "wb") as file:
            file.write(content)
