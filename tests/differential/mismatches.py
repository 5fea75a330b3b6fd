"""What counts as a difference between two outcomes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mismatch:
    """What differed.

    Args:
        what: "picture", "error" (only one of both raised, or another), "freed" (a replay touched
            memory that was given back), "operation" (it raised) or "device" (no kernel runs any
            more, so nothing that follows would say anything).
        error: norm(x - y) / norm(y) of a picture; NaN if one of both has NaN.
        text: For people.
    """

    what: str
    error: float
    text: str


def difference(
    ours: torch.Tensor | BaseException, theirs: torch.Tensor | BaseException, tolerance: float
) -> Mismatch | None:
    """Describe the difference between two outcomes; None if there is none."""
    if isinstance(ours, BaseException) or isinstance(theirs, BaseException):
        if type(ours) is type(theirs):
            return None
        one, other = (
            f"{type(x).__name__}: {x}"[:300] if isinstance(x, BaseException) else "a picture"
            for x in (ours, theirs)
        )
        return Mismatch("error", 0.0, f"{one}; the twin: {other}")
    if ours.shape != theirs.shape:
        return Mismatch("error", 0.0, f"{tuple(ours.shape)}; the twin: {tuple(theirs.shape)}")
    if theirs.isnan().any() and ours.isnan().equal(theirs.isnan()):
        return None
    error = float((ours - theirs).norm() / theirs.norm())
    if error <= tolerance:  # never true for NaN
        return None
    return Mismatch("picture", error, f"differs by {error:.2g}, {tolerance:.2g} are allowed")


def device_failure() -> str:
    """Why the GPU runs nothing any more; "" while it does."""
    try:
        torch.cuda.synchronize()
        return ""
    except RuntimeError as exc:
        return str(exc)
