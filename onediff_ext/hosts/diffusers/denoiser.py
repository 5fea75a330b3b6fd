"""The denoiser of a pipeline."""

from __future__ import annotations

from typing import Any


def denoiser_of(pipe: Any) -> Any:
    """Return a pipeline's UNet or transformer."""
    unet = getattr(pipe, "unet", None)
    return pipe.transformer if unet is None else unet
