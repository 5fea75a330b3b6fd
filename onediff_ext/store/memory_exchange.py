"""A graph exchange in the memory of one process, with that process's clock."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from onediff_ext.store.graph_exchange import LEASE_S, GraphExchange


class MemoryExchange(GraphExchange):
    """Holds graphs in memory; safe for threads.

    Args:
        lease_s: Seconds after which a lease ends that nobody renews.
        clock: Seconds, never going back.

    Attributes:
        builds: How often each graph was published, by (tag, digest).
    """

    frees_lost_holders = True

    def __init__(
        self, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lease_s, self._clock = lease_s, clock
        self._graphs: dict[tuple[str, str], bytes] = {}
        self._leases: dict[tuple[str, str], tuple[str, float]] = {}
        self._lock = threading.Lock()
        self.builds: Counter[tuple[str, str]] = Counter()

    def digests(self, tag: str) -> set[str]:
        with self._lock:
            return {digest for of_tag, digest in self._graphs if of_tag == tag}

    def fetch(self, tag: str, digest: str) -> bytes | None:
        return self._graphs.get((tag, digest))

    def publish(self, tag: str, digest: str, graph_file: bytes) -> bool:
        with self._lock:
            self.builds[tag, digest] += 1
            is_new = (tag, digest) not in self._graphs
            self._graphs.setdefault((tag, digest), graph_file)
            return is_new

    def discard(self, tag: str, digest: str) -> None:
        with self._lock:
            self._graphs.pop((tag, digest), None)

    def lease(self, tag: str, digest: str, holder: str) -> bool:
        with self._lock:
            now_s = self._clock()
            owner, ends_s = self._leases.get((tag, digest), (holder, now_s))
            if owner != holder and now_s < ends_s:
                return False
            self._leases[tag, digest] = holder, now_s + self._lease_s
            return True

    def release(self, tag: str, digest: str, holder: str) -> None:
        with self._lock:
            if self._leases.get((tag, digest), ("", 0.0))[0] == holder:
                del self._leases[tag, digest]

    def release_all(self, holder: str) -> None:
        with self._lock:
            held = [key for key, (owner, _) in self._leases.items() if owner == holder]
            for key in held:
                del self._leases[key]
