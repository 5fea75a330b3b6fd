"""Where the text encoders of each architecture lie in a checkpoint of the original layout."""

from __future__ import annotations

from dataclasses import dataclass

from onediff_ext.hosts.diffusers.checkpoints.ldm_architecture import Shapes, count_items

OPEN_CLIP_LAYERS = "transformer.resblocks."


@dataclass(frozen=True)
class TextEncoderPlace:
    """Where a text encoder lies, and how its tensors are named.

    Args:
        component: The pipeline's name for it.
        prefix: What its keys start with.
        open_clip: OpenCLIP's names (fused q, k and v); otherwise transformers' own.
        pooled: It has a projection for the pooled output.
    """

    component: str
    prefix: str
    open_clip: bool
    pooled: bool


TEXT_ENCODERS = {
    "sd1": (TextEncoderPlace("text_encoder", "cond_stage_model.transformer.", False, False),),
    "sd2": (TextEncoderPlace("text_encoder", "cond_stage_model.model.", True, False),),
    "sdxl": (
        TextEncoderPlace("text_encoder", "conditioner.embedders.0.transformer.", False, False),
        TextEncoderPlace("text_encoder_2", "conditioner.embedders.1.model.", True, True),
    ),
    "sdxl-refiner": (
        TextEncoderPlace("text_encoder_2", "conditioner.embedders.0.model.", True, True),
    ),
}
"""Architecture → its text encoders."""


def text_keys(shapes: Shapes, place: TextEncoderPlace) -> dict[str, str]:
    """Map each key of a text encoder, as it should be called, to its key in the file.

    Some SD1 files leave out `text_model.`: transformers before 4.0 wrote them so.
    """
    keys = {}
    for key in shapes:
        if not key.startswith(place.prefix):
            continue
        rest = key[len(place.prefix) :]
        if not place.open_clip and not rest.startswith("text_model."):
            rest = f"text_model.{rest}"
        keys[place.prefix + rest] = key
    return keys


def used_layers(shapes: Shapes, published_layers: int, last_layer: bool) -> int:
    """Count the layers of SD2's text encoder that its UNet is trained on.

    Args:
        shapes: The text encoder's shapes, without prefix.
        published_layers: What diffusers gives the full-size model (23 of 24).
        last_layer: The output of the last layer is used, not of the last but one.
    """
    layers = count_items(shapes, OPEN_CLIP_LAYERS)
    # Files converted from diffusers have left the unused layer out already.
    return layers if last_layer or layers == published_layers else layers - 1
