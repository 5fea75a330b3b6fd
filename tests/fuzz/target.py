"""A fuzz target, and the trial of one input."""

from __future__ import annotations

import base64
import hashlib
import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis.strategies import SearchStrategy

REGRESSIONS = Path(__file__).parent / "regressions"


@dataclass(frozen=True)
class Target:
    """Something that reads what others made.

    Args:
        name: Of the target.
        inputs: Bytes, texts, or plain values as JSON has them.
        check: Tries one input; raises for what must not happen.
        limit_s: Seconds that one input may take.
        limit_bytes: Memory that it may take; None where that is not measured, as it takes time.
    """

    name: str
    inputs: SearchStrategy[Any]
    check: Callable[[Any], None]
    limit_s: float = 2.0
    limit_bytes: int | None = None

    def __call__(self, value: Any) -> None:
        """Try one input."""
        if self.limit_bytes is not None:
            tracemalloc.start()
        start = time.process_time()
        try:
            self.check(value)
            took_s = time.process_time() - start
            if self.limit_bytes is not None:
                _, peak_bytes = tracemalloc.get_traced_memory()
                assert peak_bytes <= self.limit_bytes, f"{peak_bytes:,} bytes of memory"
        finally:
            tracemalloc.stop()
        assert took_s <= self.limit_s, f"{took_s:.1f} s"


def keep(target: Target, value: Any) -> Path:
    """Write an input that failed into a file, which every later run tries again."""
    if isinstance(value, bytes):
        entry = {"target": target.name, "base64": base64.b64encode(value).decode("ascii")}
    else:
        entry = {"target": target.name, "value": value}
    text = json.dumps(entry, indent=1, sort_keys=True) + "\n"
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()[:12]
    path = REGRESSIONS / f"{target.name}-{digest}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="ascii")
    return path


def kept(target: Target) -> list[Path]:
    """The files of a target's inputs that failed once."""
    return sorted(REGRESSIONS.glob(f"{target.name}-*.json"))


def read_kept(path: Path) -> Any:
    """The input in one of these files."""
    entry = json.loads(path.read_text(encoding="ascii"))
    return base64.b64decode(entry["base64"]) if "base64" in entry else entry["value"]
