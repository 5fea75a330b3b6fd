"""A graph exchange in a folder or bucket that `fsspec` can reach, without locks.

A lease is a file of its own for each holder, ``leases/TAG/DIGEST/TICKET``. A ticket begins with the
time of the claim; the smallest living ticket has the lease. A claim writes its ticket, then lists
again: of two that came at once, one sees the other and withdraws. Where a listing lags behind, both
may hold it until the next renewal, which lists again.

Clocks of machines differ, so nobody compares times. The holder writes a counter into its file. A
lease has ended when its counter stood still for `lease_s` by the watcher's own clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Any

from onediff_ext.core.errors import OptionError
from onediff_ext.store.graph_exchange import LEASE_S, GraphExchange
from onediff_ext.store.stored_graph import SUFFIX, is_digest


class FsspecExchange(GraphExchange):
    """Graphs and leases below one URL.

    Args:
        url: A folder, such as ``/mnt/graphs``, ``s3://bucket/graphs`` or ``gs://bucket/graphs``.
        lease_s: Seconds without renewal after which a lease has ended.
        clock: Seconds, never going back.

    Raises:
        OptionError: fsspec, or the package for this kind of URL, is not installed.
    """

    def __init__(
        self, url: str, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._files, self._root = open_url(url)
        self._lease_s, self._clock = lease_s, clock
        self._tickets: dict[tuple[str, str, str], tuple[str, int]] = {}
        self._seen: dict[str, tuple[bytes, float]] = {}  # a ticket's file → counter, since when

    def digests(self, tag: str) -> set[str]:
        names = (path.rpartition("/")[2] for path in self._list(f"{self._root}/graphs/{tag}"))
        found = {name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)}
        return {digest for digest in found if is_digest(digest)}

    def fetch(self, tag: str, digest: str) -> bytes | None:
        try:
            return bytes(self._files.cat_file(self._graph(tag, digest)))
        except FileNotFoundError:
            return None

    def publish(self, tag: str, digest: str, graph_file: bytes) -> bool:
        target = self._graph(tag, digest)
        if self._files.exists(target):
            return False
        # A folder shows a file while it is written; a rename shows it whole. Buckets do both.
        part = f"{self._root}/parts/{secrets.token_hex(8)}"
        self._put(part, graph_file)
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.mv(part, target)
        return True

    def lease(self, tag: str, digest: str, holder: str) -> bool:
        folder, key = self._lease_folder(tag, digest), (tag, digest, holder)
        if key not in self._tickets:
            if self._living(folder):
                return False
            ticket = f"{time.time_ns():020d}-{_name(holder)}-{secrets.token_hex(4)}"
            self._tickets[key] = ticket, 0
        ticket, beat = self._tickets[key]
        self._tickets[key] = ticket, beat + 1
        self._put(f"{folder}/{ticket}", str(beat).encode())
        if min(self._living(folder), default=ticket) < ticket:
            self.release(tag, digest, holder)
            return False
        return True

    def release(self, tag: str, digest: str, holder: str) -> None:
        ticket, _ = self._tickets.pop((tag, digest, holder), ("", 0))
        if ticket:
            self._remove(f"{self._lease_folder(tag, digest)}/{ticket}")

    def _living(self, folder: str) -> list[str]:
        """The living tickets of a folder; the files of the others are removed."""
        living, now_s = [], self._clock()
        for path in self._list(folder):
            try:
                counter = bytes(self._files.cat_file(path))
            except FileNotFoundError:
                continue
            if self._seen.get(path, (b"", 0.0))[0] != counter:
                self._seen[path] = counter, now_s
            if now_s - self._seen[path][1] < self._lease_s:
                living.append(path.rpartition("/")[2])
            else:
                self._remove(path)
        return living

    def _list(self, folder: str) -> list[str]:
        self._files.invalidate_cache(folder)
        try:
            return [str(path) for path in self._files.ls(folder, detail=False)]
        except FileNotFoundError:
            return []

    def _put(self, path: str, content: bytes) -> None:
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(path, content)

    def _remove(self, path: str) -> None:
        self._seen.pop(path, None)
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(path)

    def _graph(self, tag: str, digest: str) -> str:
        return f"{self._root}/graphs/{tag}/{digest}{SUFFIX}"

    def _lease_folder(self, tag: str, digest: str) -> str:
        return f"{self._root}/leases/{tag}/{digest}"


def open_url(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL or folder, and the path in it.

    Raises:
        OptionError: fsspec, or the package for this kind of URL, is not installed.
    """
    try:
        import fsspec

        files, path = fsspec.core.url_to_fs(url)
    except ImportError as exc:
        raise OptionError(f"{url} cannot be opened ({exc}).", "Install what it names.") from exc
    except ValueError as exc:
        raise OptionError(f"{url} cannot be opened ({exc}).", "Name a folder or a URL.") from exc
    return files, str(path).rstrip("/")


def _name(holder: str) -> str:
    return hashlib.sha256(holder.encode()).hexdigest()[:12]
