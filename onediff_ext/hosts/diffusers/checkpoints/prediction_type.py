"""Tell whether a UNet predicts noise or velocity when nothing in the file says so."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def probe_prediction_type(unet: Any) -> str:
    """Ask an SD2 UNet at the last timestep, where its input is nearly all noise.

    One that predicts noise repeats its input; one that predicts v answers minus the picture, far
    below a grey input.

    Returns:
        "epsilon" or "v_prediction".

    Source: Salimans & Ho 2022, arXiv:2202.00512 (v); the test and its threshold, A1111's
    `is_using_v_parameterization_for_sd2`.
    """
    # latent [1, 4, 8, 8], context [1, 2, D]
    latent = torch.full((1, 4, 8, 8), 0.5, device=unet.device, dtype=unet.dtype)
    context = torch.zeros(
        (1, 2, unet.config.cross_attention_dim), device=unet.device, dtype=unet.dtype
    )
    timestep = torch.tensor([999], device=unet.device)
    answer = unet(latent, timestep, encoder_hidden_states=context).sample
    return "v_prediction" if (answer - latent).float().mean() < -1 else "epsilon"
