"""The denoiser of a pipeline."""

from __future__ import annotations

from typing import Any


def denoiser_of(pipe: Any) -> Any:
    """Return a pipeline's UNet or transformer, or None."""
    unet = getattr(pipe, "unet", None)
    return getattr(pipe, "transformer", None) if unet is None else unet


def takes_guidance(model: Any) -> bool:
    """Return whether a denoiser takes the guidance scale as an input, as a distilled LCM does.

    Args:
        model: A UNet or a transformer of diffusers.
    """
    return bool(getattr(model.config, "time_cond_proj_dim", None))
