"""The port through which stores of several machines share graphs, and agree on who builds.

Entries are kept apart by *machine tag*: a graph is published under the tag of the machine that
built it and tried it, and fetched only by machines of the same tag.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

LEASE_S = 30.0
"""A lease ends when its holder has not renewed it for so long."""


class GraphExchange(ABC):
    """Graph files and leases that several machines share. Methods raise OSError when it is away.

    Attributes:
        frees_lost_holders: Whether `release_all` gives back the leases of a process that is gone.
            Elsewhere they end by themselves, so each process needs a name that nobody had before.
    """

    frees_lost_holders = False

    @abstractmethod
    def digests(self, tag: str) -> set[str]:
        """Return the digests of all graphs of a machine tag.

        Args:
            tag: The machine tag.
        """

    @abstractmethod
    def fetch(self, tag: str, digest: str) -> bytes | None:
        """Return a graph file, or None when there is none.

        Args:
            tag: The machine tag.
            digest: Of the kind's key.
        """

    @abstractmethod
    def publish(self, tag: str, digest: str, graph_file: bytes) -> bool:
        """Add a graph file unless there is one.

        Args:
            tag: The machine tag.
            digest: Of the kind's key.
            graph_file: The bytes of the file.

        Returns:
            Whether it was added.
        """

    @abstractmethod
    def discard(self, tag: str, digest: str) -> None:
        """Delete a graph file that is damaged, so that a sound one can take its place.

        Args:
            tag: The machine tag.
            digest: Of the kind's key.
        """

    @abstractmethod
    def lease(self, tag: str, digest: str, holder: str) -> bool:
        """Take or renew the right to build a kind.

        Args:
            tag: The machine tag.
            digest: Of the kind's key.
            holder: Who asks; the same name renews.

        Returns:
            False when somebody else has it, or has come first.
        """

    @abstractmethod
    def release(self, tag: str, digest: str, holder: str) -> None:
        """Give a lease back.

        Args:
            tag: The machine tag.
            digest: Of the kind's key.
            holder: The name that took the lease.
        """

    def release_all(self, holder: str) -> None:  # noqa: B027
        """Give back the leases of a holder that is gone, where `frees_lost_holders`.

        Args:
            holder: The name that took the leases.
        """
