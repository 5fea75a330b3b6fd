"""A graph exchange in a folder or bucket that `fsspec` can reach, without locks.

Each holder has a file of its own for a lease, ``leases/TAG/DIGEST/TICKET``. A claim writes it, then
lists the folder: only who sees no other ticket has the lease. Two that come at once see each
other. The one whose ticket sorts first looks again after a moment, when the other has withdrawn.
Where a listing lags behind, both may hold the lease until the next renewal, which lists again.

Clocks of machines differ, so nobody compares times. The holder writes a counter into its file, 0
while it claims. A lease has ended when its counter stood still for `lease_s` by the watcher's own
clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onediff_ext.core.url_errors import opening
from onediff_ext.store.graph_exchange import LEASE_S, GraphExchange
from onediff_ext.store.stored_graph import SUFFIX, is_digest

_CLAIMING = (b"0", b"")  # empty: just being written
_PAUSE_S = 0.2  # in which a claim that came at the same time withdraws


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

    @property
    def folder(self) -> Path | None:
        """The folder where the URL is one of this machine, such as ``file:///C:/graphs``."""
        protocols = self._files.protocol
        protocols = (protocols,) if isinstance(protocols, str) else protocols
        return Path(self._root) if "file" in protocols else None

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
        self._make_folder(target.rpartition("/")[0])
        self._files.mv(part, target)
        return True

    def discard(self, tag: str, digest: str) -> None:
        self._remove(self._graph(tag, digest))

    def lease(self, tag: str, digest: str, holder: str) -> bool:
        folder, key = self._lease_folder(tag, digest), (tag, digest, holder)
        if key in self._tickets:
            return self._renew(folder, key)
        if self._living(folder):
            return False
        ticket = f"{time.time_ns():020d}-{_name(holder)}-{secrets.token_hex(4)}"
        self._tickets[key] = ticket, 0
        self._put(f"{folder}/{ticket}", b"0")
        others = self._living(folder).keys() - {ticket}
        if others and ticket < min(others):
            time.sleep(_PAUSE_S)
            others = self._living(folder).keys() - {ticket}
        if others:
            self.release(tag, digest, holder)
            return False
        return self._renew(folder, key)

    def _renew(self, folder: str, key: tuple[str, str, str]) -> bool:
        ticket, beat = self._tickets[key]
        path = f"{folder}/{ticket}"
        if not self._files.exists(path):  # taken for dead, and removed
            del self._tickets[key]
            return False
        self._tickets[key] = ticket, beat + 1
        self._put(path, str(beat + 1).encode())
        held = [name for name, counter in self._living(folder).items() if counter not in _CLAIMING]
        if min(held, default=ticket) < ticket:
            self.release(*key)
            return False
        return True

    def release(self, tag: str, digest: str, holder: str) -> None:
        ticket, _ = self._tickets.pop((tag, digest, holder), ("", 0))
        if ticket:
            self._remove(f"{self._lease_folder(tag, digest)}/{ticket}")

    def _living(self, folder: str) -> dict[str, bytes]:
        """The living tickets of a folder and their counters; the files of the others go."""
        living, now_s = {}, self._clock()
        for path in self._list(folder):
            try:
                counter = bytes(self._files.cat_file(path))
            except FileNotFoundError:
                continue
            if path not in self._seen or self._seen[path][0] != counter:
                self._seen[path] = counter, now_s
            if now_s - self._seen[path][1] < self._lease_s:
                living[path.rpartition("/")[2]] = counter
            else:
                self._remove(path)
        return living

    def _list(self, folder: str) -> list[str]:
        self._files.invalidate_cache(folder)
        try:
            return [str(path) for path in self._files.ls(folder, detail=False)]
        except FileNotFoundError:
            return []

    def _make_folder(self, folder: str) -> None:
        self._files.makedirs(folder, exist_ok=True)

    def _put(self, path: str, content: bytes) -> None:
        self._make_folder(path.rpartition("/")[0])
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

    Args:
        url: As in `FsspecExchange`.

    Raises:
        OptionError: fsspec, or the package for this kind of URL, is not installed.
    """
    with opening(url):
        import fsspec  # type: ignore[import-untyped]

        files, path = fsspec.core.url_to_fs(url)
    return files, str(path).rstrip("/")


def _name(holder: str) -> str:
    return hashlib.sha256(holder.encode()).hexdigest()[:12]
