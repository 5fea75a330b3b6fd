"""One forward run as two of half the batch, for when memory is short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onediff_ext.engine.cuda_graphs.argument_containers import ArgumentContainers
from onediff_ext.engine.half_of_batch import half_of_batch


def run_in_halves(
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    error: RuntimeError,
) -> Any:
    """Run a forward on both halves of its batch.

    The images of the batch must not depend on each other.

    Args:
        forward: The model's own.
        args, kwargs: Of the whole batch.
        error: What the whole batch has raised.

    Returns:
        The outputs of both halves, joined along the first dimension. The lists and dictionaries of
        the call are changed as the forward of the second half changed its own.

    Raises:
        torch.OutOfMemoryError: `error`, when the batch cannot be halved; or that of a half.
    """
    leaves, structure = pytree.tree_flatten((tuple(args), kwargs))
    batch = batch_of(leaves)
    if batch is None:
        raise error
    torch.cuda.empty_cache()
    containers, changes = ArgumentContainers(args, kwargs), None
    outputs = []
    for number, rows in enumerate((slice(0, batch // 2), slice(batch // 2, batch))):
        half = [leaf[rows] if has_rows(leaf, batch) else leaf for leaf in leaves]
        half_args, half_kwargs = pytree.tree_unflatten(half, structure)
        halves = ArgumentContainers(half_args, half_kwargs)
        with half_of_batch(number):
            outputs.append(forward(*half_args, **half_kwargs))
        changes = halves.changes()
    containers.apply(changes or ())
    return joined(*outputs)


def batch_of(leaves: Sequence[Any]) -> int | None:
    """Return the batch of a call that can be halved, else None.

    The batch is the first dimension of the 4-dimensional tensors among the arguments.

    Args:
        leaves: The arguments, and what lies in their lists and dictionaries.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    batch = max((t.shape[0] for t in tensors if t.ndim == 4), default=1)
    if batch < 2 or any(t.ndim and t.shape[0] not in (1, batch) for t in tensors):
        return None
    return batch


def has_rows(leaf: object, batch: int) -> bool:
    """Whether an argument has a row for each image of the batch.

    Args:
        leaf: One argument, or a value inside a list or dictionary.
        batch: Images of the whole batch.
    """
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == batch


def joined(first_output: Any, second_output: Any) -> Any:
    """Return the outputs of two halves as one output.

    Args:
        first_output, second_output: Of equal structure; each tensor has a row for each image of its
            half.

    Returns:
        The same structure with tensors (batch, ...). Scalars and values that are no tensors are
        those of the first half.
    """
    first, form = pytree.tree_flatten(first_output)
    second = pytree.tree_flatten(second_output)[0]
    both = [
        torch.cat([a, b]) if isinstance(a, torch.Tensor) and a.ndim else a
        for a, b in zip(first, second, strict=True)
    ]
    return pytree.tree_unflatten(both, form)
