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
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

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
_KEPT_PROMPTS = 16  # calls of a first step


class PromptTensor:
    """A tensor of a prompt: equal slices of one tensor are the same, however often they are made.

    Args:
        tensor: Of any shape. It is held weakly.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        base = None if tensor.is_nested or tensor.layout is not torch.strided else tensor._base
        self._owner = weakref.ref(tensor if base is None else base)
        self._place: object = None  # of the tensor in the owner
        if base is not None:
            self._place = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)

    def is_same(self, other: PromptTensor) -> bool:
        """Whether both are the same part of one tensor that is still alive."""
        owner = self._owner()
        return owner is not None and owner is other._owner() and self._place == other._place


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

    Attributes:
        number: The timestep at the time of the call, since a buffer may get others. None where it
            tells nothing or would have to be waited for.
    """

    part: ComponentId
    model: int
    shapes: tuple[tuple[int, ...], ...]
    timestep: Any = None
    prompt: tuple[PromptTensor, ...] = ()
    number: float | None = field(init=False)

    def __post_init__(self) -> None:
        known = None if _is_element(self.timestep) else _known_value(self.timestep)
        object.__setattr__(self, "number", known)

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
        known = (*names[:1], "sample", "hidden_states", *named)
        sample = args[0] if args else next((named[name] for name in known if name in named), None)
        timesteps = [named[name] for name in _TIMESTEPS if name in named]
        prompts = [named[name] for name in _PROMPTS if name in named]
        return cls(
            part,
            id(model),
            tuple(tuple(tensor.shape) for tensor in _tensors(sample)),
            None if part.role.is_vae or not timesteps else timesteps[0],
            tuple(map(PromptTensor, _tensors(*prompts))),
        )

    def has_prompt_of(self, other: ModelCall) -> bool:
        """Whether both calls got the same prompt tensors, or none."""
        return len(self.prompt) == len(other.prompt) and all(
            map(PromptTensor.is_same, self.prompt, other.prompt)
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


class _Calls(NamedTuple):
    """The calls of one part in the present picture.

    Args:
        first, last: Two of them.
        prompts: Calls of the first step. Guidance may call the model for each prompt.
    """

    first: ModelCall
    last: ModelCall
    prompts: tuple[ModelCall, ...]


class PictureClock:
    """Knows the calls of the present picture."""

    def __init__(self) -> None:
        self._seen: dict[ComponentId, _Calls] = {}

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
            goes_on = bool(places) and place >= max(places) and not self._has_other(call.part)
            calls = _Calls(call, call, (call,))
        else:
            order = _order(known, call)
            goes_on = order is not None and _is_later(*order) and _has_known_prompt(known, call)
            if goes_on:
                calls = known._replace(last=call)
            else:
                is_first_step = order is not None and len(set(order)) == 1
                prompts = known.prompts[1 - _KEPT_PROMPTS :] if is_first_step else ()
                calls = _Calls(call, call, (*prompts, call))
        if not goes_on:
            self._seen.clear()
        self._seen[call.part] = calls
        return goes_on

    def _has_other(self, part: ComponentId) -> bool:
        """Whether a denoiser comes after another one, as that of another picture does."""
        return part.role.is_denoiser and any(known.role.is_denoiser for known in self._seen)


def _has_known_prompt(known: _Calls, now: ModelCall) -> bool:
    """Whether a call has a prompt of the first step: another one may be another picture's."""
    return any(map(now.has_prompt_of, known.prompts))


def _order(known: _Calls, now: ModelCall) -> tuple[float, float, float] | None:
    """Return the places in one schedule of the first call, of the last one and of this one.

    None if they are not certainly of one.
    """
    first, last = known.first, known.last
    if now.model != last.model or now.shapes != last.shapes:
        return None
    begin, one, other = first.timestep, last.timestep, now.timestep
    if _is_element(one) or _is_element(other):
        if not all(isinstance(timestep, torch.Tensor) for timestep in (begin, one, other)):
            return None
        if not are_of_one_tensor(one, other):
            return None
        return begin.storage_offset(), one.storage_offset(), other.storage_offset()
    falling = [-each.number for each in (first, last, now) if each.number is not None]
    if len(falling) < 3 or not now.prompt:
        return None
    return falling[0], falling[1], falling[2]


def _is_element(timestep: object) -> bool:
    return isinstance(timestep, torch.Tensor) and is_element(timestep)


def _known_value(timestep: object) -> float | None:
    """The number of a timestep, if reading it waits for no GPU and nobody sees it as an operator.

    Modes such as `FakeTensorMode` have no numbers, or raise when one is read.
    """
    if not isinstance(timestep, torch.Tensor):
        return float(timestep) if isinstance(timestep, Real) else None
    bindings: Any = torch._C
    is_readable = (
        type(timestep) in (torch.Tensor, torch.nn.Parameter)
        and timestep.device.type == "cpu"
        and timestep.numel() > 0
        and not timestep.is_complex()
        and not bindings._len_torch_dispatch_stack()
    )
    return value_of(timestep) if is_readable else None


def _is_later(first: float, last: float, now: float) -> bool:
    """Whether a call comes later in a schedule, or is another one of the same step.

    Two calls of the first step may be two pictures of one step each.
    """
    return now > last or (now == last > first)
