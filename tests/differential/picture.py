"""The arguments of a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Picture:
    """The arguments of the next picture."""

    height: int = 64
    width: int = 64
    batch: int = 1
    steps: int = 2
    noise: int = 0
    guidance: float = 3.0
    tokens: int = 77
    way: str = "pipe"
    lora_scale: float | None = None
    inference: bool = False
    autocast: bool = False
    in_thread: bool = False
    as_picture: bool = True
    mode: Any = None  # a context manager's class
    extra: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, Any] = field(default_factory=dict)
