"""Blocks that every backend has to run: each with its family and a function that makes inputs."""

from __future__ import annotations

from typing import Any

import torch

from onediff_ext.hosts.diffusers.blocks import ResnetFamily, TransformerFamily
from onediff_ext.hosts.diffusers.token_blocks import QwenImageFamily

CPU = torch.device("cpu")


def _resnet() -> torch.nn.Module:
    from diffusers.models.resnet import ResnetBlock2D

    torch.manual_seed(0)
    # A group has eight numbers even in a single pixel: with two, which may lie close together,
    # normalising them blows rounding up to any size.
    block = ResnetBlock2D(in_channels=16, out_channels=24, temb_channels=32, groups=2)
    return block.eval().requires_grad_(False).to(memory_format=torch.channels_last)


def _transformer() -> torch.nn.Module:
    from diffusers.models.attention import BasicTransformerBlock

    torch.manual_seed(0)
    return BasicTransformerBlock(24, 2, 12, cross_attention_dim=20).eval().requires_grad_(False)


def _two_streams() -> torch.nn.Module:
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock

    torch.manual_seed(0)
    return QwenImageTransformerBlock(32, 2, 16).eval().requires_grad_(False)


def _two_streams_inputs(batch: int, height: int, width: int) -> tuple[Any, ...]:
    """Image, text, no mask, time, and complex tables of image and text."""
    image, text = height * width, 7 * width
    tables = tuple(torch.randn(tokens, 8, dtype=torch.complex64) for tokens in (image, text))
    streams = torch.randn(batch, image, 32), torch.randn(batch, text, 32)
    return (*streams, None, torch.randn(batch, 32), tables)


def _image(batch: int, height: int, width: int) -> torch.Tensor:
    return torch.randn(batch, 16, height, width).to(memory_format=torch.channels_last)


BLOCKS = {
    "resnet": (
        ResnetFamily(),
        _resnet,
        lambda b, h, w: (_image(b, h, w), torch.randn(b, 32)),
    ),
    "transformer": (
        TransformerFamily(),
        _transformer,
        lambda b, h, w: (torch.randn(b, h * w, 24), None, torch.randn(b, 7 * w, 20)),
    ),
    "two streams": (QwenImageFamily(), _two_streams, _two_streams_inputs),
}
"""Name -> family, function that makes the block, function (batch, height, width) -> inputs."""
