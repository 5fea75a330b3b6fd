"""The arguments of one forward, split into tensors and everything else."""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onediff_ext.engine.cuda_graphs.argument_containers import ArgumentContainers
from onediff_ext.engine.torch_versions import (
    autocast_dtype,
    cudnn_attention_enabled,
    float32_settings,
    fp16_accumulation,
)
from onediff_ext.engine.validity.foreign_code import transform_reason

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
# They name a prompt and change no computation: a host may give each prompt a new one in each image.
_NAMES = (uuid.UUID,)


@dataclass(frozen=True, eq=False)
class ForwardCall:
    """One call of a model's forward.

    Args:
        key: Equal for calls that one CUDA graph can serve: structure, sizes, dtypes, plain values
            and torch's modes.
        tensors: The tensors among the arguments, in order.
        device: Of the largest tensor, which lies on the model's device.
        modes: The part of torch's global state that a CUDA graph freezes; part of `key`.
        form: `key` without the sizes of tensors.
        containers: The lists and dictionaries among the arguments.
    """

    key: Hashable
    tensors: tuple[torch.Tensor, ...]
    device: torch.device
    modes: Hashable
    form: Hashable
    containers: ArgumentContainers
    _leaves: tuple[Any, ...]
    _structure: pytree.TreeSpec

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with other tensors.

        Args:
            tensors: Take the places of `self.tensors`, in the same order.

        Returns:
            Positional and keyword arguments. Containers are new at each call, so that a forward
            may change them.
        """
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return tuple(args), dict(kwargs)


def read_call(args: Sequence[Any], kwargs: dict[str, Any]) -> ForwardCall | str:
    """Sort the arguments of a forward.

    Args:
        args, kwargs: Of the forward. Lists, tuples and dictionaries may be nested.

    Returns:
        The call, or a text that says why no CUDA graph can serve it.
    """
    leaves, structure = pytree.tree_flatten((tuple(args), kwargs))
    tensors: list[torch.Tensor] = []
    forms: list[Hashable] = []
    sizes: list[torch.Size] = []
    for leaf in leaves:
        if type(leaf) in (torch.Tensor, torch.nn.Parameter):
            tensors.append(leaf)
            forms.append((leaf.dtype, leaf.device))
            sizes.append(leaf.shape)
        elif isinstance(leaf, _PLAIN):
            forms.append((type(leaf).__name__, leaf))
        elif isinstance(leaf, _NAMES):
            forms.append(type(leaf).__name__)
        else:
            return f"an argument is a {type(leaf).__qualname__}"
    if not tensors:
        return "no argument is a tensor"
    if torch.is_grad_enabled():
        return "gradients are enabled"
    reason = transform_reason()
    if reason is not None:
        return reason
    device = max(tensors, key=lambda t: t.numel()).device
    if device.type == "meta":
        return "arguments have no contents"
    for tensor in tensors:
        if tensor.device != device and (tensor.device.type != "cpu" or tensor.numel() > 1):
            return "arguments lie on different devices"
    modes = _modes(device)
    form = (str(structure), tuple(forms), modes)
    key = (form, tuple(sizes))
    containers = ArgumentContainers(args, kwargs)
    return ForwardCall(
        key, tuple(tensors), device, modes, form, containers, tuple(leaves), structure
    )


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors in a forward's output, in order.

    Args:
        output: A tensor, or a structure of tensors and other values.
    """
    return [leaf for leaf in pytree.tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]


def _modes(device: torch.device) -> Hashable:
    """The part of torch's global state that a CUDA graph freezes."""
    cuda: Any = torch.backends.cuda
    return (
        autocast_dtype(device.type),
        torch.get_default_dtype(),  # of tensors that the forward makes
        torch.are_deterministic_algorithms_enabled(),
        *float32_settings(),
        fp16_accumulation(),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cudnn_attention_enabled(),
    )
