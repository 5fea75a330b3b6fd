"""How diffusers' pipelines call their denoisers.

A CUDA graph serves calls of one form: the same arguments by place and by name, in one order, of one
dtype. What a warm-up records serves pictures when it calls as they do.

Source: the denoising loops of diffusers 0.42's pipelines.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any, NamedTuple

import torch


class CallForm(NamedTuple):
    """The form of a call.

    Args:
        by_place: Names of positional arguments.
        by_name: Names of keyword arguments, in order. Those without an input are None.
        has_scheduler_timestep: Whether ``timestep`` has the dtype of the scheduler's; else it has
            that of the latents.
        has_empty_kwargs: Whether the arguments of attention processors are ``{}`` instead of None.
    """

    by_place: tuple[str, ...]
    by_name: tuple[str, ...]
    has_scheduler_timestep: bool = False
    has_empty_kwargs: bool = False


_ATTENTION_KWARGS = ("joint_attention_kwargs", "attention_kwargs")
_FORMS = {
    "UNet2DConditionModel": CallForm(
        ("sample", "timestep"),
        (
            *("encoder_hidden_states", "timestep_cond", "cross_attention_kwargs"),
            *("added_cond_kwargs", "return_dict"),
        ),
        has_scheduler_timestep=True,
    ),
    "SD3Transformer2DModel": CallForm(
        (),
        (
            *("hidden_states", "timestep", "encoder_hidden_states", "pooled_projections"),
            *("joint_attention_kwargs", "return_dict"),
        ),
        has_scheduler_timestep=True,
    ),
    "FluxTransformer2DModel": CallForm(
        (),
        (
            *("hidden_states", "timestep", "guidance", "pooled_projections"),
            *("encoder_hidden_states", "txt_ids", "img_ids", "joint_attention_kwargs"),
            "return_dict",
        ),
        has_empty_kwargs=True,
    ),
    "ChromaTransformer2DModel": CallForm(
        (),
        (
            *("hidden_states", "timestep", "encoder_hidden_states", "txt_ids", "img_ids"),
            *("attention_mask", "joint_attention_kwargs", "return_dict"),
        ),
        has_empty_kwargs=True,
    ),
    "Lumina2Transformer2DModel": CallForm(
        (),
        (
            *("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask"),
            *("return_dict", "attention_kwargs"),
        ),
        has_scheduler_timestep=True,
    ),
    "QwenImageTransformer2DModel": CallForm(
        (),
        (
            *("hidden_states", "timestep", "guidance", "encoder_hidden_states_mask"),
            *("encoder_hidden_states", "img_shapes", "attention_kwargs", "return_dict"),
        ),
        has_empty_kwargs=True,
    ),
    "ZImageTransformer2DModel": CallForm(
        ("x", "t", "cap_feats"), ("joint_attention_kwargs", "return_dict")
    ),
}


def as_in_pipelines(
    model: Any, inputs: dict[str, Any], timestep_dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call as diffusers' pipelines call this kind of model.

    Args:
        model: A denoiser.
        inputs: Its keyword arguments, from `denoiser_inputs`.
        timestep_dtype: From `timestep_dtype_of` the pipeline's scheduler.

    Returns:
        Positional and keyword arguments; `inputs` alone for a kind whose pipelines are not known.
    """
    form = _FORMS.get(type(model).__name__)
    if form is None or not inputs.keys() <= {*form.by_place, *form.by_name}:
        return (), inputs
    given = {**inputs, "return_dict": False}
    if form.has_empty_kwargs:
        given.update({name: {} for name in _ATTENTION_KWARGS})
    if form.has_scheduler_timestep and timestep_dtype is not None:
        given["timestep"] = inputs["timestep"].to(timestep_dtype)
    return (
        tuple(given[name] for name in form.by_place),
        {name: given.get(name) for name in form.by_name},
    )


def timestep_dtype_of(scheduler: Any) -> torch.dtype | None:
    """Return the dtype of the timesteps that a scheduler gives a picture; None if it has none.

    Args:
        scheduler: A pipeline's, or None. It stays as it is.
    """
    scheduler = copy.deepcopy(scheduler)
    # Those with dynamic shifting want the picture's size; their dtype is the same before.
    with contextlib.suppress(Exception):
        scheduler.set_timesteps(2)
    timesteps = getattr(scheduler, "timesteps", None)
    return timesteps.dtype if isinstance(timesteps, torch.Tensor) else None
