"""Stands for Forge's ``backend.nn.mmditx``: SD3.5-medium's three forms of one block."""

from __future__ import annotations

from typing import Any

import torch
from backend.nn.unet import timestep_embedding  # type: ignore[import-not-found]
from backend.operations import ForgeOperations as ops  # type: ignore[import-not-found]  # noqa: N813
from torch import nn
from torch.nn import functional as F  # noqa: N812

WIDTH, HEADS = 32, 2


def attention(q: Any, k: Any, v: Any, heads: int) -> Any:
    q, k, v = (
        t.view(t.shape[0], -1, heads, t.shape[-1] // heads).transpose(1, 2) for t in (q, k, v)
    )
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.to(x)


class SelfAttention(nn.Module):
    def __init__(self, dim: int, pre_only: bool = False) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = ops.Linear(dim, 3 * dim)
        self.proj = None if pre_only else ops.Linear(dim, dim)
        self.ln_q, self.ln_k = RMSNorm(dim // HEADS), RMSNorm(dim // HEADS)

    def pre_attention(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return self.ln_q(q).flatten(2), self.ln_k(k).flatten(2), v.flatten(2)


class DismantledBlock(nn.Module):
    """Half of a block: what it does before attention and after it."""

    def __init__(self, dim: int, pre_only: bool, x_block_self_attn: bool) -> None:
        super().__init__()
        self.pre_only, self.x_block_self_attn = pre_only, x_block_self_attn
        self.norm1 = nn.LayerNorm(dim, 1e-6, False)
        self.attn = SelfAttention(dim, pre_only)
        self.parts = 9 if x_block_self_attn else 2 if pre_only else 6
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), ops.Linear(dim, self.parts * dim))
        if x_block_self_attn:
            self.attn2 = SelfAttention(dim)
        if not pre_only:
            self.norm2 = nn.LayerNorm(dim, 1e-6, False)
            self.mlp = nn.Sequential(
                ops.Linear(dim, 4 * dim), nn.GELU("tanh"), ops.Linear(4 * dim, dim)
            )

    def modulations(self, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.adaLN_modulation(c)[:, None].chunk(self.parts, -1)  # type: ignore[no-any-return]

    def finish(self, x: Any, mixed: Any, gate: Any, shift: Any, scale: Any, last_gate: Any) -> Any:
        x = x + gate * self.attn.proj(mixed)
        return x + last_gate * self.mlp(self.norm2(x) * (1 + scale) + shift)


def block_mixing(context: Any, x: Any, context_block: Any, x_block: Any, c: Any) -> Any:
    context_mod, x_mod = context_block.modulations(c), x_block.modulations(c)
    normed = x_block.norm1(x)
    text = context_block.norm1(context) * (1 + context_mod[1]) + context_mod[0]
    both = zip(
        context_block.attn.pre_attention(text),
        x_block.attn.pre_attention(normed * (1 + x_mod[1]) + x_mod[0]),
        strict=True,
    )
    mixed = attention(*(torch.cat(pair, 1) for pair in both), x_block.attn.num_heads)
    tokens = context.shape[1]
    if context_block.pre_only:
        context = None
    else:
        context = context_block.finish(context, mixed[:, :tokens], *context_mod[2:])
    if x_block.x_block_self_attn:
        second = x_block.attn2.pre_attention(normed * (1 + x_mod[7]) + x_mod[6])
        x = x + x_mod[8] * x_block.attn2.proj(attention(*second, x_block.attn2.num_heads))
    return context, x_block.finish(x, mixed[:, tokens:], *x_mod[2:6])


class JointBlock(nn.Module):
    def __init__(self, dim: int, pre_only: bool = False, x_block_self_attn: bool = False) -> None:
        super().__init__()
        self.context_block = DismantledBlock(dim, pre_only, False)
        self.x_block = DismantledBlock(dim, False, x_block_self_attn)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return block_mixing(*args, context_block=self.context_block, x_block=self.x_block, **kwargs)


class TimestepEmbedder(nn.Module):
    """Its frequencies come from the CPU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(ops.Linear(8, dim), nn.SiLU(), ops.Linear(dim, dim))

    @staticmethod
    def timestep_embedding(t: torch.Tensor, dim: int, max_period: float = 10000) -> torch.Tensor:
        found: torch.Tensor = timestep_embedding(t, dim, max_period)
        return found

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.timestep_embedding(t, 8))  # type: ignore[no-any-return]


class VectorEmbedder(nn.Module):
    def __init__(self, inputs: int, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(ops.Linear(inputs, dim), nn.SiLU(), ops.Linear(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)  # type: ignore[no-any-return]


class MMDiTX(nn.Module):
    """x [B, 16, H, W], t [B], y [B, 20], context [B, M, 24] → as x."""

    def __init__(self) -> None:
        super().__init__()
        self.in_channels = 16
        self.x_embedder = ops.Conv2d(16, WIDTH, 2, stride=2)
        self.t_embedder, self.y_embedder = TimestepEmbedder(WIDTH), VectorEmbedder(20, WIDTH)
        self.context_embedder = ops.Linear(24, WIDTH)
        self.joint_blocks = nn.ModuleList(
            (
                JointBlock(WIDTH, x_block_self_attn=True),
                JointBlock(WIDTH),
                JointBlock(WIDTH),
                JointBlock(WIDTH, pre_only=True),
            )
        )
        self.final_layer = ops.Linear(WIDTH, 64)

    def forward(
        self,
        x: Any,
        t: Any,
        y: Any = None,
        context: Any = None,
        control: Any = None,
        transformer_options: Any = None,
        **_: Any,
    ) -> Any:
        image = self.x_embedder(x)
        x = image.flatten(2).transpose(1, 2)
        c, context = self.t_embedder(t) + self.y_embedder(y), self.context_embedder(context)
        for block in self.joint_blocks:
            context, x = block(context, x, c=c)
        x = self.final_layer(x).transpose(1, 2)
        return F.fold(x, [2 * side for side in image.shape[2:]], 2, stride=2)
