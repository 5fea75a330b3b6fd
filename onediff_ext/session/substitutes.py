"""What a session uses in place of options that this machine cannot follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onediff_ext.backends.registry import drawing_device
from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.quantization import PRECISIONS, unavailable_reason


@dataclass(frozen=True)
class Substitute:
    """One option that is not followed.

    Args:
        option: Name of the field of `CompileOptions`.
        used: The value that is used.
        reason: Why, for people.
    """

    option: str
    used: str
    reason: str


def substitutes(
    options: CompileOptions,
    backend: str,
    backend_reason: str,
    device: torch.device | None = None,
) -> tuple[Substitute, ...]:
    """Return the options that are not followed; empty when all are.

    Args:
        options: The user's choices.
        backend: Name of the backend in use.
        backend_reason: Why it is another one than chosen; ``""`` when it is the chosen one.
        device: Where the models are; None for where this machine draws.
    """
    found = []
    if backend_reason:
        found.append(Substitute("backend", backend, backend_reason))
    if options.precision in PRECISIONS:
        reason = unavailable_reason(options.precision, device or drawing_device())
        if reason is not None:
            found.append(Substitute("precision", CompileOptions.precision, reason))
    return tuple(found)
