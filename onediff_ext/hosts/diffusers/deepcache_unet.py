"""DeepCache for diffusers' UNet2DConditionModel: a shallow forward has shorter lists of blocks.

The encoder's layers are, in order, the residual blocks (with their attention) and the downsamplers
of `down_blocks`. Each makes one skip connection, after that of `conv_in`. The decoder's layers take
them in reverse. At depth n the first n layers of the encoder and the last n + 1 of the decoder run.
The feature is the input that the first of these decoder layers gets from the layer before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onediff_ext.core.deepcache_options import few_steps_reason
from onediff_ext.core.errors import OptionError
from onediff_ext.engine.deepcache.features import Feature
from onediff_ext.engine.deepcache.known_layers import KnownLayers
from onediff_ext.engine.deepcache.unet_adapter import (
    Replay,
    Uncached,
    UNetAdapter,
    UNetCall,
    keeping,
    replaced,
)
from onediff_ext.engine.torch_versions import autocast_dtype
from onediff_ext.hosts.diffusers.denoiser import takes_guidance

_DOWN = ("DownBlock2D", "CrossAttnDownBlock2D")
_UP = ("UpBlock2D", "CrossAttnUpBlock2D")
_ORDER = ("sample", "timestep", "encoder_hidden_states")


class _Middle(nn.Module):
    """Replaces the middle block and returns the cached feature."""

    def __init__(self, feature: Feature) -> None:
        super().__init__()
        self.forward = Replay(feature)


@dataclass(frozen=True)
class _Cut:
    """Where one depth cuts a UNet.

    Args:
        boundary: The module whose output is the feature.
        children: (parent, name, the child in a shallow forward), without the middle block.
        adapter_residuals: How many of a T2I-Adapter's residuals belong to layers that run.
    """

    boundary: nn.Module
    children: tuple[tuple[nn.Module, str, nn.Module | None], ...]
    adapter_residuals: int


class DiffusersUNet(UNetAdapter):
    """The adapter for one UNet.

    Args:
        unet: A UNet2DConditionModel with the blocks of Stable Diffusion.

    Raises:
        OptionError: It has other blocks.
    """

    def __init__(self, unet: Any) -> None:
        if not _has_known_blocks(unet):
            raise OptionError(
                f"DeepCache does not know the blocks of this {type(unet).__name__}.",
                "It works with the UNets of SD 1.x, SD 2.x and SDXL.",
            )
        self._unet = unet
        self._known = KnownLayers()
        self._cuts: dict[int, _Cut] = {}
        # Added to the feature, which contains a ControlNet's residual for the middle already.
        self._zero: torch.Tensor | None = None

    def describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> UNetCall | Uncached:
        given = {**dict(zip(_ORDER, args, strict=False)), **kwargs}
        # sample [2B, C, H/8, W/8], context [2B, 77n, D]
        sample, context = given.get("sample"), given.get("encoder_hidden_states")
        if not isinstance(sample, torch.Tensor) or len(args) > len(_ORDER):
            return Uncached("the UNet was called in a way that is not known")
        if not _has_known_blocks(self._unet):
            return Uncached("the UNet has a block that is not known")
        if self._known.look(_layers(self._unet)):
            self._cuts.clear()
        if (keeper := _keeper_in(self._unet.mid_block)) is not None:
            return Uncached(f"the attention processor {keeper.__name__} may keep what it computes")
        extra = given.get("added_cond_kwargs") or {}
        dtypes = (sample.dtype, autocast_dtype(sample.device.type))
        kind = (sample.shape, dtypes, sample.device, getattr(context, "shape", None))
        state = (
            self._known.version,
            tuple(sorted(k for k, v in given.items() if v is not None and k not in _ORDER)),
            tuple(sorted(extra)),
            _plain_values(given.get("cross_attention_kwargs")),
            len(given.get("down_block_additional_residuals") or ()),
        )
        return UNetCall(kind, state, sample.shape[0])

    def max_depth(self) -> int:
        return sum(len(_encoder_layers(block)) for block in self._unet.down_blocks) - 1

    def full(self, depth: int, feature: Feature) -> AbstractContextManager[None]:
        return keeping(self._cut(depth).boundary, feature)

    def shallow(self, depth: int, feature: Feature) -> AbstractContextManager[None]:
        middle = feature.parts.setdefault("middle", _Middle(feature))
        return replaced((*self._cut(depth).children, (self._unet, "mid_block", middle)))

    def shallow_arguments(
        self, depth: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        changed = dict(kwargs)
        count = self._cut(depth).adapter_residuals
        down, middle = "down_block_additional_residuals", "mid_block_additional_residual"
        names = ["down_intrablock_additional_residuals"]
        if changed.get(middle) is not None:
            changed[middle] = self._nothing(changed[middle])
        else:
            names.append(down)  # an old way to pass those of a T2I-Adapter
        for name in names:
            if changed.get(name) is not None:
                changed[name] = list(changed[name])[:count]
        return tuple(args), changed

    def _nothing(self, like: torch.Tensor) -> torch.Tensor:
        zero = self._zero
        if zero is None or (zero.dtype, zero.device) != (like.dtype, like.device):
            self._zero = zero = torch.zeros((), dtype=like.dtype, device=like.device)
        return zero

    def _cut(self, depth: int) -> _Cut:
        cut = self._cuts.get(depth)
        if cut is None:
            self._cuts[depth] = cut = self._make_cut(depth)
        return cut

    def _make_cut(self, depth: int) -> _Cut:
        unet = self._unet
        children: list[tuple[nn.Module, str, nn.Module | None]] = []
        kept_down: list[nn.Module] = []
        left, residuals = depth, 0
        for block in unet.down_blocks:
            if left == 0:
                break
            kept_down.append(block)
            layers = len(_encoder_layers(block))
            if left >= layers:
                left -= layers
                residuals += 1
                continue
            children += _first_layers(block, left)
            # A residual is added after the last attention, or without one after the downsampler.
            residuals += _has_attention(block) and left == len(block.resnets)
            left = 0
        kept_up: list[nn.Module] = []
        left, boundary = depth + 1, unet.mid_block
        for index in range(len(unet.up_blocks) - 1, -1, -1):
            block = unet.up_blocks[index]
            kept_up.insert(0, block)
            skipped = len(block.resnets) - left
            left -= len(block.resnets)
            if skipped > 0:
                layers = block.attentions if _has_attention(block) else block.resnets
                boundary = layers[skipped - 1]
                children += _last_layers(block, skipped)
            elif left == 0 and index > 0:
                boundary = unet.up_blocks[index - 1]
            if left <= 0:
                break
        children.append((unet, "down_blocks", nn.ModuleList(kept_down)))
        children.append((unet, "up_blocks", nn.ModuleList(kept_up)))
        return _Cut(boundary, tuple(children), residuals)


def distilled_reason(unet: Any) -> str | None:
    """Why DeepCache saves nothing with this UNet, or None.

    A distilled LCM takes the guidance as an input, and needs only a few steps.
    """
    return few_steps_reason("an LCM checkpoint", None) if takes_guidance(unet) else None


def _has_known_blocks(unet: Any) -> bool:
    down, up = getattr(unet, "down_blocks", ()), getattr(unet, "up_blocks", ())
    known = all(type(b).__name__ in _DOWN for b in down) and all(
        type(b).__name__ in _UP for b in up
    )
    return bool(known and up and unet.mid_block is not None)


def _layers(unet: Any) -> list[nn.Module]:
    """All modules that the lists of a shallow forward are made of."""
    layers: list[nn.Module] = [unet.mid_block]
    for block in (*unet.down_blocks, *unet.up_blocks):
        layers += [block, *block.resnets]
        layers += [*getattr(block, "attentions", ()), *(getattr(block, "downsamplers", None) or ())]
    return layers


def _keeper_in(middle: Any) -> type | None:
    """The class of a pipeline's or an extension's own attention processor in a skipped block.

    SAG's, for one, keeps a map of attention, which the pipeline reads after the UNet.
    """
    for transformer in getattr(middle, "attentions", ()):
        for block in getattr(transformer, "transformer_blocks", ()):
            for attention in (block.attn1, block.attn2):
                cls = type(getattr(attention, "processor", None))
                if not cls.__module__.startswith(("diffusers.models.", "builtins")):
                    return cls
    return None


def _has_attention(block: Any) -> bool:
    return bool(getattr(block, "has_cross_attention", False))


def _encoder_layers(block: Any) -> list[nn.Module]:
    return [*block.resnets, *(block.downsamplers or ())]


def _first_layers(block: Any, count: int) -> list[tuple[nn.Module, str, nn.Module | None]]:
    """The children of an encoder block with its first layers only, without its downsampler."""
    children: list[tuple[nn.Module, str, nn.Module | None]] = [
        (block, "resnets", nn.ModuleList(block.resnets[:count]))
    ]
    if block.downsamplers is not None:
        children.append((block, "downsamplers", None))
    if _has_attention(block):
        children.append((block, "attentions", nn.ModuleList(block.attentions[:count])))
    return children


def _last_layers(block: Any, skipped: int) -> list[tuple[nn.Module, str, nn.Module | None]]:
    """The children of a decoder block with its last layers only."""
    names = ("resnets", "attentions") if _has_attention(block) else ("resnets",)
    return [(block, name, nn.ModuleList(getattr(block, name)[skipped:])) for name in names]


def _plain_values(given: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    plain = (bool, int, float, str)
    return tuple(
        (name, value if isinstance(value, plain) else type(value).__name__)
        for name, value in sorted((given or {}).items())
    )
