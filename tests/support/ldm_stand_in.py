"""Small models of the same classes, names and habits as CompVis' ``ldm``, under its name.

The real package belongs to the WebUI and is not on CI's machines. What matters of it is here:
`_forward` beside `forward`, an attention that cannot be traced, a residual block that takes an
embedding, and image attention in the VAE.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import nn


class GroupNorm32(nn.GroupNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).type(x.dtype)


class ResBlock(nn.Module):
    """x [B, C, H, W], emb [B, E] → [B, C', H, W]."""

    def __init__(self, channels: int, emb_channels: int, out_channels: int) -> None:
        super().__init__()
        self.channels, self.out_channels, self.updown = channels, out_channels, False
        self.use_checkpoint = False
        self.in_layers = nn.Sequential(
            nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, out_channels, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_channels, out_channels))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(8, out_channels),
            nn.SiLU(),
            nn.Conv2d(out_channels, out_channels, 3, padding=1),
        )
        same = channels == out_channels
        self.skip_connection = nn.Identity() if same else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        return self._forward(x, emb)

    def _forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        hidden = self.in_layers(x) + self.emb_layers(emb)[..., None, None]
        return self.skip_connection(x) + self.out_layers(hidden)


class CrossAttention(nn.Module):
    """x [B, N, D], context [B, M, C] → [B, N, D]; slices by size, which cannot be traced."""

    def __init__(self, query_dim: int, context_dim: int | None, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(query_dim, query_dim, bias=False)
        self.to_k = nn.Linear(context_dim or query_dim, query_dim, bias=False)
        self.to_v = nn.Linear(context_dim or query_dim, query_dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(query_dim, query_dim), nn.Dropout(0.0))

    def forward(
        self, x: torch.Tensor, context: torch.Tensor | None = None, mask: None = None
    ) -> torch.Tensor:
        context = x if context is None else context
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        mixed = torch.empty_like(q)
        for start in range(0, q.shape[2], 16):
            part = slice(start, start + 16)
            scores = q[:, :, part] @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            mixed[:, :, part] = scores.softmax(-1) @ v
        return self.to_out(mixed.transpose(1, 2).flatten(2))


class GEGLU(nn.Module):
    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * nn.functional.gelu(gate)


class BasicTransformerBlock(nn.Module):
    """x [B, N, D], context [B, M, C] → [B, N, D]."""

    def __init__(self, dim: int, heads: int, context_dim: int) -> None:
        super().__init__()
        self.disable_self_attn, self.checkpoint = False, False
        self.attn1 = CrossAttention(dim, None, heads)
        self.attn2 = CrossAttention(dim, context_dim, heads)
        self.ff = nn.Sequential(GEGLU(dim, dim * 4), nn.Linear(dim * 4, dim))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        return self._forward(x, context)

    def _forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        x = self.attn1(self.norm1(x)) + x
        x = self.attn2(self.norm2(x), context=context) + x
        return self.ff(self.norm3(x)) + x


class ResnetBlock(nn.Module):
    """The VAE's: x [B, C, H, W] → [B, C', H, W], `temb` is None."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.norm1 = nn.GroupNorm(8, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        if in_channels != out_channels:
            self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: torch.Tensor, temb: torch.Tensor | None) -> torch.Tensor:
        h = self.conv1(nn.functional.silu(self.norm1(x)))
        h = self.conv2(nn.functional.silu(self.norm2(h)))
        return (self.nin_shortcut(x) if self.in_channels != self.out_channels else x) + h


class AttnBlock(nn.Module):
    """The VAE's: x [B, C, H, W] → the same."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.norm = nn.GroupNorm(8, in_channels)
        self.q, self.k, self.v, self.proj_out = (
            nn.Conv2d(in_channels, in_channels, 1) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = self.q(h).flatten(2), self.k(h).flatten(2), self.v(h).flatten(2)
        scores = (q.transpose(1, 2) @ k) * self.in_channels**-0.5
        mixed = v @ scores.softmax(-1).transpose(1, 2)
        return x + self.proj_out(mixed.unflatten(2, x.shape[2:]))


class UNetModel(nn.Module):
    """x [B, 4, H, W], timesteps [B], context [B, M, 24] → [B, 4, H, W]."""

    num_classes = None

    def __init__(self) -> None:
        super().__init__()
        self.input_blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(4, 16, 3, padding=1))])
        self.time_embed = nn.Linear(1, 12)
        self.first, self.second = ResBlock(16, 12, 16), ResBlock(16, 12, 32)
        self.third = ResBlock(16, 12, 16)
        self.transformer = BasicTransformerBlock(32, 4, 24)
        # Behind the blocks, as in real ones, it would hide what one is multiplied with.
        self.norm = GroupNorm32(8, 16)
        self.out = nn.Conv2d(32, 4, 3, padding=1)

    def forward(
        self, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor
    ) -> torch.Tensor:
        emb = self.time_embed(timesteps[:, None] / 1000)
        h = self.third(self.first(self.norm(self.input_blocks[0](x)), emb), emb)
        h = self.second(h, emb)
        tokens = self.transformer(h.flatten(2).transpose(1, 2), context)
        return self.out(tokens.transpose(1, 2).unflatten(2, x.shape[2:]))


class Decoder(nn.Module):
    """z [B, 4, H, W] → [B, 3, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(4, 16, 3, padding=1)
        self.attention, self.block = AttnBlock(16), ResnetBlock(16, 8)
        self.norm_out = nn.GroupNorm(4, 8)
        self.conv_out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.conv_out(self.norm_out(self.block(self.attention(self.conv_in(z)), None)))


class Encoder(nn.Module):
    """x [B, 3, 8 H, 8 W] → mean and deviation of a latent [B, 8, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, 8, 3, stride=8, padding=1)
        self.block = ResnetBlock(8, 16)
        self.conv_out = nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_out(self.block(self.conv_in(x), None))


_PLACES = {
    "modules.attention": (CrossAttention, GEGLU, BasicTransformerBlock),
    "modules.diffusionmodules.util": (GroupNorm32,),
    "modules.diffusionmodules.openaimodel": (ResBlock, UNetModel),
    "modules.diffusionmodules.model": (ResnetBlock, AttnBlock, Encoder, Decoder),
}


@contextmanager
def installed() -> Iterator[None]:
    """`ldm` and `sgm` as far as they are needed, in `sys.modules`; classes live in `ldm`."""
    before = {name: sys.modules.get(name) for name in _names()}
    homes = {cls: cls.__module__ for classes in _PLACES.values() for cls in classes}
    for name in _names():
        module = ModuleType(name)
        module.__file__ = __file__
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    for place, classes in _PLACES.items():
        for cls in classes:
            setattr(sys.modules[f"ldm.{place}"], cls.__name__, cls)
            live_in(cls, f"ldm.{place}")
    for cls in (CrossAttention, AttnBlock):
        place = cls.__module__.replace("ldm.", "sgm.")
        other = type(cls.__name__, (nn.Module,), {"__module__": place})
        other.forward = cls.forward  # type: ignore[attr-defined]
        setattr(sys.modules[place], cls.__name__, other)
    try:
        yield
    finally:
        for cls, home in homes.items():
            live_in(cls, home)
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def live_in(cls: type, module: str) -> None:
    """Let a class and its methods come from this module, by their names and by their globals."""
    cls.__module__ = module
    for name, value in list(vars(cls).items()):
        if isinstance(value, types.FunctionType):
            setattr(cls, name, written_in(value, module))


def written_in(function: types.FunctionType, module: str) -> types.FunctionType:
    """A function as if it had been written in this module."""
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, "__name__": module},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__, copy.__qualname__ = module, function.__qualname__
    return copy


def _names() -> list[str]:
    names = []
    for package in ("ldm", "sgm"):
        names += [package, f"{package}.modules", f"{package}.modules.diffusionmodules"]
        names += [f"{package}.{place}" for place in _PLACES]
    return names
