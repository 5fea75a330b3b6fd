"""The published hyper-parameters: right in size, and deduced again from full-size shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from onediff_ext.core.errors import CheckpointError
from onediff_ext.hosts.diffusers.checkpoints.architectures import ARCHITECTURES, read_architecture
from onediff_ext.hosts.diffusers.checkpoints.ldm_architecture import (
    UNET_PREFIX,
    VAE_PREFIX,
    below,
    deduce_text_encoder,
    deduce_vae,
)
from onediff_ext.hosts.diffusers.checkpoints.ldm_checkpoint import unet_config
from onediff_ext.hosts.diffusers.checkpoints.ldm_hints import LdmHints
from onediff_ext.hosts.diffusers.checkpoints.ldm_names import (
    to_clip_text,
    to_ldm_unet,
    to_ldm_vae,
    to_open_clip_text,
)
from onediff_ext.hosts.diffusers.checkpoints.ldm_text_encoders import TEXT_ENCODERS, used_layers
from onediff_ext.hosts.diffusers.checkpoints.prediction_type import probe_prediction_type


def build(cls: Any, *args: Any, **config: Any) -> Any:
    with init_empty_weights():
        return cls(*args, **config)


def shapes_of(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, tuple[int, ...]]:
    return below({key: tuple(one.shape) for key, one in tensors.items()}, prefix)


@pytest.mark.parametrize("label", ARCHITECTURES)
def test_unet(label: str) -> None:
    architecture = read_architecture(label)
    unet = build(UNet2DConditionModel, **architecture.unet)
    # Millions of parameters; the refiner's by its 4.52 GB in half precision.
    millions = {"sd1": 859.5, "sd2": 865.9, "sdxl": 2567.5, "sdxl-refiner": 2259.5}[label]
    assert sum(one.numel() for one in unet.parameters()) / 1e6 == pytest.approx(millions, abs=0.2)
    shapes = shapes_of(to_ldm_unet(unet.state_dict(), unet.config), UNET_PREFIX)
    deduced = unet_config(shapes, architecture, LdmHints(), pooled_width=1280)
    # A level without attention has no depth.
    expected = {**architecture.unet}
    if label == "sdxl-refiner":
        expected["transformer_layers_per_block"] = [1, 4, 4, 4]
    assert deduced == expected


@pytest.mark.parametrize("label", ARCHITECTURES)
def test_vae(label: str) -> None:
    config = read_architecture(label).vae
    vae = build(AutoencoderKL, **config)
    assert sum(one.numel() for one in vae.parameters()) / 1e6 == pytest.approx(83.65, abs=0.02)
    deduced = deduce_vae(shapes_of(to_ldm_vae(vae.state_dict(), vae.config), VAE_PREFIX))
    assert deduced.items() <= config.items()


@pytest.mark.parametrize("label", ARCHITECTURES)
def test_text_encoders(label: str) -> None:
    architecture = read_architecture(label)
    for place in TEXT_ENCODERS[label]:
        config = architecture.text_encoders[place.component]
        cls = CLIPTextModelWithProjection if place.pooled else CLIPTextModel
        model = build(cls, CLIPTextConfig(**config))
        if place.open_clip:
            weights = to_open_clip_text(model.state_dict(), place.prefix, model, label == "sd2")
            shapes = shapes_of(weights, place.prefix)
        else:
            weights = to_clip_text(model.state_dict(), place.prefix)
            shapes = shapes_of(weights, f"{place.prefix}text_model.")
        deduced = deduce_text_encoder(shapes)
        if label == "sd2":
            assert deduced["num_hidden_layers"] == 24
            deduced["num_hidden_layers"] = used_layers(shapes, 23, last_layer=False)
        assert deduced.items() <= config.items()


def test_sd2_layers() -> None:
    def layers(count: int) -> dict[str, tuple[int, ...]]:
        return {f"transformer.resblocks.{n}.ln_1.weight": (8,) for n in range(count)}

    assert used_layers(layers(24), 23, last_layer=False) == 23
    # As diffusers' own conversion to the original layout leaves it.
    assert used_layers(layers(23), 23, last_layer=False) == 23
    assert used_layers(layers(3), 23, last_layer=False) == 2
    assert used_layers(layers(3), 23, last_layer=True) == 3


def test_unknown_label() -> None:
    with pytest.raises(CheckpointError, match="no architecture"):
        read_architecture("sd9")


def test_caller_may_change_what_it_read() -> None:
    read_architecture("sd1").unet["in_channels"] = 9
    assert read_architecture("sd1").unet["in_channels"] == 4


class FakeUnet:
    """Answers as a UNet would for an input that is all noise."""

    device, dtype = torch.device("cpu"), torch.float32
    config = SimpleNamespace(cross_attention_dim=8)

    def __init__(self, factor: float, offset: float) -> None:
        self.factor, self.offset = factor, offset

    def __call__(self, latent: torch.Tensor, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(sample=self.factor * latent + self.offset)


def test_probe() -> None:
    assert probe_prediction_type(FakeUnet(1.0, 0.02)) == "epsilon"
    assert probe_prediction_type(FakeUnet(0.1, -1.2)) == "v_prediction"
