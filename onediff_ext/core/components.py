"""The components of a checkpoint: the role of each, and its number where several share a role."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(str, Enum):
    """The role of a component. Equal to its text, so it may stand in sets of option names."""

    UNET = "unet"
    TRANSFORMER = "transformer"
    VAE_ENCODER = "vae_encoder"
    VAE_DECODER = "vae_decoder"
    CONTROLNET = "controlnet"

    @property
    def label(self) -> str:
        """Such as "VAE decoder", for messages."""
        return _LABELS[self]

    @property
    def is_denoiser(self) -> bool:
        """Whether it runs at each step and predicts the noise."""
        return self in (Role.UNET, Role.TRANSFORMER)

    @property
    def is_vae(self) -> bool:
        """Whether it is a half of the VAE, which runs once for an image and not at each step."""
        return self in (Role.VAE_ENCODER, Role.VAE_DECODER)


_LABELS = {
    Role.UNET: "UNet",
    Role.TRANSFORMER: "transformer",
    Role.VAE_ENCODER: "VAE encoder",
    Role.VAE_DECODER: "VAE decoder",
    Role.CONTROLNET: "ControlNet",
}


@dataclass(frozen=True, order=True)
class ComponentId:
    """One component of a host or a pipeline.

    Args:
        role: What it does.
        index: Its place among the components of this role, from 0.
    """

    role: Role
    index: int = 0

    def __str__(self) -> str:
        """Such as "unet" or "controlnet 2", for messages and logs."""
        role: str = self.role.value
        return role if self.index == 0 else f"{role} {self.index + 1}"
