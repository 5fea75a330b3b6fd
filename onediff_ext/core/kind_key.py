"""The identity of a kind: named entries, so that a miss can be explained.

Source: the idea of a key made of named parts is JAX's (`jax/_src/cache_key.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class KindKey:
    """What identifies the graph of a kind of block.

    Args:
        entries: Name → value, both plain text. Two blocks share a graph exactly
            when all entries are equal.
    """

    entries: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the entries in canonical JSON, 64 hexadecimal digits."""
        text = json.dumps(dict(self.entries), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KindKey) and self.digest == other.digest

    def differences(self, other: KindKey) -> list[str]:
        """Say, entry by entry, how another key differs from this one.

        Returns:
            Lines such as ``"torch 2.13.0 → 2.14.0"``, from `other` (what is
            stored) to `self` (what is needed); empty when the keys are equal.
        """
        lines = []
        for name in sorted({*self.entries, *other.entries}):
            mine, theirs = self.entries.get(name, "absent"), other.entries.get(name, "absent")
            if mine != theirs:
                lines.append(f"{name} {theirs} → {mine}")
        return lines
