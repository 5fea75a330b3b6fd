"""Which calls of a WebUI's UNet have the batch of prompt and negative prompt, and in which order.

A1111 puts the rows of the prompts first, and those of the negative prompts last. Prompts with AND
have several rows for one picture, and NGMS leaves the negative prompts' rows out. Forge, reForge
and Neo tell the parts of each call in ``transformer_options["cond_or_uncond"]``: 0 is the prompt's.
With AND and little memory a call may have some of the parts only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onediff_ext.engine.guidance.guided_forward import GuidedCall

OTHER_BATCH = "the batch is not one prompt and one negative prompt for each picture"
OTHER_LATENTS = "prompt and negative prompt draw different latents"
PATCHED = "an extension changes the UNet's blocks, and may tell both prompts apart"

_ORDER = ("x", "timesteps", "context", "y")
_KNOWN = frozenset({*_ORDER, "control"})
# Tensors among a call's options: with the rows of its batch, and of the whole picture's steps.
_OF_ROWS = ("sigmas", "cond_mark")
_OF_SCHEDULE = ("sample_sigmas", "sampling_sigmas")
# Of the options that a host makes for each call: what the prompt's half gets, given its rows.
_OF_PROMPT: Mapping[str, Callable[[int], list[int]]] = {
    "cond_or_uncond": lambda rows: [0],  # noqa: ARG005
    "cond_indices": lambda rows: list(range(rows)),
    "uncond_indices": lambda rows: [],  # noqa: ARG005
}


def read_ldm_call(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    step: int,
    steps: int,
    rows: tuple[int, int] | None,
    prompt: Hashable = None,
) -> GuidedCall | str:
    """Read one call of a UNet, without reading the values of tensors.

    Args:
        args, kwargs: Of the call.
        step, steps: Of the picture.
        rows: The prompts and the negative prompts of this step, as the host encoded them; None
            where that is unknown.
        prompt: As for `GuidedCall`.

    Returns:
        The call, or why it has to run whole.
    """
    given = {**dict(zip(_ORDER, args, strict=False)), **kwargs}
    x, options = given.get("x"), given.pop("transformer_options", None)
    unknown = [name for name, value in given.items() if name not in _KNOWN and _tensors(value)]
    if not isinstance(x, torch.Tensor) or len(args) > len(_ORDER) or unknown:
        return f"an argument may have other rows: {', '.join(unknown) or 'unknown ones'}"
    if rows is None or rows[0] != rows[1] or x.shape[0] != sum(rows):
        return OTHER_BATCH
    if options is None:
        return GuidedCall(step, steps, x, is_prompt_first=True, prompt=prompt)
    parts = list(options.get("cond_or_uncond") or ())
    if sorted(parts) != [0, 1]:
        return OTHER_BATCH
    if any(callable(leaf) for leaf in pytree.tree_flatten(options)[0]):
        return PATCHED
    is_prompt_first = parts[0] == 0
    of_prompt = _options_of_prompt(options, x.shape[0], is_prompt_first)
    if isinstance(of_prompt, str):
        return of_prompt
    own = {"transformer_options": of_prompt}
    return GuidedCall(step, steps, x, is_prompt_first, own, prompt)


def draws_one_latent(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether both halves of a call draw the same latents. Waits for a GPU.

    Regions of a picture are parts of a batch too, where they have the same shape.

    Args:
        args, kwargs: Of a call of which `read_ldm_call` knows the batch.
    """
    x = args[0] if args else kwargs["x"]
    return torch.equal(*x.chunk(2))


def _options_of_prompt(
    options: Mapping[str, Any], batch: int, is_prompt_first: bool
) -> dict[str, Any] | str:
    """The ``transformer_options`` of the prompt's half, or why there are none."""
    half = batch // 2
    rows = slice(0, half) if is_prompt_first else slice(half, batch)
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in _OF_PROMPT:
            found[name] = _OF_PROMPT[name](half)
        elif name == "uuids":
            found[name] = value[:1] if is_prompt_first else value[1:]
        elif name in _OF_ROWS:
            is_whole = isinstance(value, torch.Tensor) and value.shape[:1] == (batch,)
            found[name] = value[rows] if is_whole else value
        elif name in _OF_SCHEDULE:
            found[name] = value
        elif _tensors(value):
            return f"an argument may have other rows: {name}"
        else:
            found[name] = value
    return found


def _tensors(value: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_flatten(value)[0])
