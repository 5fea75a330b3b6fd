"""Tells the pictures of a bare module apart, by what is certain.

A pipeline's call is announced as a picture; calls of a module in a user's own loop are not. A later
step of the same schedule belongs to the same picture. Whatever is uncertain begins a new picture.
That costs one comparison of the weights. The opposite error could draw a picture with old weights.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onediff_ext.core.components import ComponentId, Role
from onediff_ext.engine.timesteps import are_of_one_tensor, is_element, value_of

# The models of one picture are called in this order for the first time.
_ORDER = (
    Role.VAE_ENCODER,
    Role.CONTROLNET,
    Role.UNET,
    Role.TRANSFORMER,
    Role.VAE_DECODER,
)
# What the forwards of hosts' models call their arguments.
_TIMESTEPS = ("timestep", "timesteps", "t")
_PROMPTS = ("encoder_hidden_states", "context", "cap_feats")


@dataclass(frozen=True, eq=False)
class ModelCall:
    """What one call of a model shows of its picture.

    Args:
        part: What the model is; a picture has one model for each part.
        model: Identifies the model.
        shapes: Of the latent [B, C, H/8, W/8], of each latent of a list, or of a VAE's input.
        timestep: As passed to the model; None for a VAE. The object is kept, so that no other
            tensor gets its memory.
        prompt: The tensors, [B, 77n, D] or one for each picture, that steps of one picture share.
    """

    part: ComponentId
    model: int
    shapes: tuple[tuple[int, ...], ...]
    timestep: Any = None
    prompt: tuple[weakref.ref[torch.Tensor], ...] = ()

    @classmethod
    def of(
        cls, part: ComponentId, model: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> ModelCall:
        """Read a call of a UNet, a transformer, a ControlNet or a part of a VAE.

        Args:
            part: What the model is.
            model: Its class has a ``forward`` that names its arguments. Those of another one that
                are not named tell nothing.
            args, kwargs: Of the call.
        """
        names = _names(getattr(type(model), "forward", None))
        named = dict(zip(names, args, strict=False)) | dict(kwargs)
        sample = args[0] if args else named.get("sample", next(iter(kwargs.values()), None))
        timesteps = [named[name] for name in _TIMESTEPS if name in named]
        prompts = [named[name] for name in _PROMPTS if name in named]
        return cls(
            part,
            id(model),
            tuple(tuple(tensor.shape) for tensor in _tensors(sample)),
            None if part.role.is_vae or not timesteps else timesteps[0],
            tuple(weakref.ref(tensor) for tensor in _tensors(*prompts)),
        )

    def has_prompt_of(self, other: ModelCall) -> bool:
        """Whether both calls got the same prompt tensors."""
        mine, theirs = ([tensor() for tensor in call.prompt] for call in (self, other))
        return len(mine) == len(theirs) > 0 and all(
            one is not None and one is that for one, that in zip(mine, theirs, strict=True)
        )


@functools.lru_cache(maxsize=64)
def _names(forward: Callable[..., Any] | None) -> tuple[str, ...]:
    """The names of a forward's arguments behind ``self``, up to those that have none."""
    try:
        parameters = () if forward is None else inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # of compiled code
        parameters = ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(each.name for each in parameters if each.kind in kinds)[1:]


def _tensors(*values: object) -> Iterator[torch.Tensor]:
    """The tensors among values and in the lists among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(*value)


class PictureClock:
    """Knows the calls of the present picture."""

    def __init__(self) -> None:
        # The first and the last call of each part.
        self._seen: dict[ComponentId, tuple[ModelCall, ModelCall]] = {}

    def forget(self) -> None:
        """End the present picture."""
        self._seen.clear()

    def continues(self, call: ModelCall | None) -> bool:
        """Note a call, which begins a picture if it certainly does not continue the present one.

        Args:
            call: None for a call of which nothing is known.

        Returns:
            Whether the call belongs to the present picture.
        """
        if call is None:
            self._seen.clear()
            return False
        known = self._seen.get(call.part)
        if known is None:
            place = _ORDER.index(call.part.role)
            places = [_ORDER.index(part.role) for part in self._seen]
            goes_on = bool(places) and place >= max(places)
        else:
            goes_on = known[1].model == call.model and _goes_on(*known, call)
        if not goes_on:
            self._seen.clear()
        first = known[0] if known is not None and goes_on else call
        self._seen[call.part] = (first, call)
        return goes_on


def _goes_on(first: ModelCall, last: ModelCall, now: ModelCall) -> bool:
    """Whether a call is a later one of the same schedule."""
    if now.shapes != last.shapes:
        return False
    begin, one, other = first.timestep, last.timestep, now.timestep
    if _is_element(one) or _is_element(other):
        if not all(isinstance(timestep, torch.Tensor) for timestep in (begin, one, other)):
            return False
        places = [timestep.storage_offset() for timestep in (begin, one, other)]
        return are_of_one_tensor(one, other) and _is_later(*places)
    values = [_known_value(timestep) for timestep in (begin, one, other)]
    falling = [-value for value in values if value is not None]
    return len(falling) == 3 and now.has_prompt_of(last) and _is_later(*falling)


def _is_element(timestep: object) -> bool:
    return isinstance(timestep, torch.Tensor) and is_element(timestep)


def _known_value(timestep: object) -> float | None:
    """The number of a timestep, if it can be read without waiting for a GPU."""
    if isinstance(timestep, torch.Tensor):
        is_readable = timestep.device.type == "cpu" and timestep.numel() > 0
        return value_of(timestep) if is_readable else None
    return float(timestep) if isinstance(timestep, (int, float)) else None


def _is_later(first: float, last: float, now: float) -> bool:
    """Whether a call comes later in a schedule, or is another one of the same step.

    Two calls of the first step may be two pictures of one step each.
    """
    return now > last or (now == last > first)
