"""The block kinds that a session has met, and those of the checkpoint in use."""

from __future__ import annotations

from collections.abc import Callable

import torch

from onediff_ext.core.forks import fork_safe_lock
from onediff_ext.core.kind_key import KindKey
from onediff_ext.engine.blocks.block_kind import BlockKind, KindState


class MetKinds:
    """Kinds by key and device. Any thread may use it.

    Attributes:
        lock: Held while a kind is found. A caller that holds it sees no change.
    """

    def __init__(self) -> None:
        self.lock = fork_safe_lock()
        self._kinds: dict[tuple[str, torch.device], BlockKind] = {}
        self._current: set[str] = set()

    def find(
        self,
        key: KindKey,
        device: torch.device,
        make: Callable[[], BlockKind],
        on_new: Callable[[BlockKind], None],
    ) -> BlockKind:
        """Return the kind of a key on a device, and count it to the current checkpoint.

        Args:
            key: Identifies the kind on disk.
            device: The device of the kind's blocks.
            make: Makes a kind that was not met before.
            on_new: Called with a new kind.
        """
        with self.lock:
            self._current.add(key.digest)
            kind = self._kinds.get((key.digest, device))
            if kind is None:
                kind = make()
                self._kinds[key.digest, device] = kind
                on_new(kind)
            return kind

    def forget_current(self) -> None:
        """Another checkpoint is drawn with: count its kinds from now on."""
        with self.lock:
            self._current.clear()

    def all(self) -> list[BlockKind]:
        """Return all kinds, in the order of their first call."""
        with self.lock:
            return list(self._kinds.values())

    def current(self) -> list[BlockKind]:
        """Return the kinds that the current checkpoint has used."""
        with self.lock:
            return [kind for (digest, _), kind in self._kinds.items() if digest in self._current]

    def missing(self) -> list[BlockKind]:
        """Return kinds without a graph that could have one, those that cost most time first.

        A kind that lies on several devices is listed for one device at a time.
        """
        missing = {
            kind.key.digest: kind
            for kind in reversed(self.all())
            if kind.state is KindState.MISSING and not kind.is_coming and not kind.waits
        }
        return sorted(missing.values(), key=lambda kind: -kind.weight)
