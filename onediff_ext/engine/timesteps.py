"""Where a timestep stands in its schedule, read from its memory and never from its value.

Samplers pass the elements of one tensor to the model, in order. Reading an element's value would
wait for the GPU; its address and offset say as much.
"""

from __future__ import annotations

import torch


def is_element(timestep: torch.Tensor) -> bool:
    """Return whether a timestep is one number of a longer tensor, perhaps expanded.

    Args:
        timestep: A tensor of any shape.
    """
    own = 1 if not any(timestep.stride()) else timestep.numel()
    return timestep.untyped_storage().nbytes() > own * timestep.element_size()


def are_of_one_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two timesteps lie in the same memory. One of them must have been kept alive
    since the other one was made.

    Args:
        one, other: Tensors of any shape.
    """
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def value_of(timestep: object) -> float:
    """Return the (first) number of a timestep. Waits for a GPU.

    Args:
        timestep: A number, or a tensor of any shape.
    """
    if isinstance(timestep, torch.Tensor):
        return float(timestep.flatten()[0])
    return float(timestep)  # type: ignore[arg-type]
