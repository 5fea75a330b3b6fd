"""What the timesteps of a UNet's calls tell: pictures, evaluations, the length of the schedule."""

from __future__ import annotations

from typing import Any

import torch

from onediff_ext.engine.timesteps import are_of_one_tensor, is_element, value_of


def is_same_picture(last: Any, now: Any) -> bool:
    """Return whether two calls of a UNet, one after the other, belong to one picture.

    Args:
        last, now: Their timesteps. `last` has been kept alive.
    """
    if isinstance(last, torch.Tensor) and isinstance(now, torch.Tensor):
        if now is last:
            return True
        same_memory = are_of_one_tensor(last, now)
        if same_memory or is_element(last) or is_element(now):
            # A loop of one's own may go through the scheduler's tensor again.
            return same_memory and now.storage_offset() >= last.storage_offset()
    return value_of(now) <= value_of(last)


def is_same_evaluation(last: Any, now: Any) -> bool:
    """Return whether two calls of one picture belong to one evaluation.

    Args:
        last, now: As for `is_same_picture`.
    """
    if isinstance(now, torch.Tensor) and isinstance(last, torch.Tensor):
        if now is last:
            return True
        if is_element(now):
            return now.storage_offset() == last.storage_offset()
    return value_of(now) == value_of(last)


def evaluations_left(timestep: Any) -> int | None:
    """Return how many timesteps are left in the scheduler's tensor, including this one.

    Args:
        timestep: Of a call. None is returned for one that is no element of a tensor.
    """
    whole = whole_schedule(timestep)
    return None if whole is None else whole - int(timestep.storage_offset())


def whole_schedule(timestep: Any) -> int | None:
    """Return how many timesteps the scheduler's tensor has.

    Args:
        timestep: As for `evaluations_left`.
    """
    if not isinstance(timestep, torch.Tensor) or not is_element(timestep):
        return None
    return int(timestep.untyped_storage().nbytes() // timestep.element_size())
