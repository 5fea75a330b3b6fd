"""The models of a pipeline that can run through graphs, and those that a user has compiled."""

from __future__ import annotations

from typing import Any

from torch import nn

from onediff_ext.core.components import ComponentId, Role
from onediff_ext.engine.torch_compile import is_compiled, is_compiled_function, unwrapped


def find_models(pipe: object, ignored: frozenset[str]) -> list[tuple[ComponentId, nn.Module]]:
    """The pipeline's models that can run compiled.

    Args:
        pipe: Any diffusers pipeline.
        ignored: Roles to leave out, as `parse_ignores` returns them.

    Returns:
        The role and number of each, and the model: the one inside where a user's `torch.compile`
        has made another module of it.
    """
    return [
        (identity, unwrapped(model))
        for identity, model in _candidates(pipe)
        if identity.role not in ignored and isinstance(model, nn.Module)
    ]


def _candidates(pipe: object) -> list[tuple[ComponentId, Any]]:
    vae, controlnet = getattr(pipe, "vae", None), getattr(pipe, "controlnet", None)
    nets = getattr(controlnet, "nets", None) or [controlnet]
    return [
        (ComponentId(Role.UNET), getattr(pipe, "unet", None)),
        (ComponentId(Role.TRANSFORMER), getattr(pipe, "transformer", None)),
        (ComponentId(Role.TRANSFORMER, 1), getattr(pipe, "transformer_2", None)),
        (ComponentId(Role.VAE_ENCODER), getattr(vae, "encoder", None)),
        (ComponentId(Role.VAE_DECODER), getattr(vae, "decoder", None)),
        *((ComponentId(Role.CONTROLNET, index), net) for index, net in enumerate(nets)),
    ]


def compiled_by_user(pipe: object) -> set[nn.Module]:
    """Return the pipeline's models whose calls run a user's own `torch.compile`.

    Args:
        pipe: Any diffusers pipeline.
    """
    methods = {Role.VAE_ENCODER: "encode", Role.VAE_DECODER: "decode"}
    vae = getattr(unwrapped(getattr(pipe, "vae", None)), "__dict__", {})
    return {
        unwrapped(model)
        for identity, model in _candidates(pipe)
        if isinstance(model, nn.Module)
        and (
            is_compiled(model)
            or is_compiled(unwrapped(model))
            or is_compiled_function(vae.get(methods.get(identity.role, "")))
        )
    }
