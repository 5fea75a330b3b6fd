"""Stands for Forge's ``backend.nn.chroma``: Flux' blocks, with modulations made ahead of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from backend.nn.flux import (  # type: ignore[import-not-found]
    HEADS,
    PATCH,
    WIDTH,
    EmbedND,
    MLPEmbedder,
    QKNorm,
    RMSNorm,
    SelfAttention,
    attention,
    join_heads,
    mlp,
    positions,
    split_heads,
    timestep_embedding,
)
from backend.operations import ForgeOperations as ops  # type: ignore[import-not-found]  # noqa: N813
from torch import nn
from torch.nn import functional as F  # noqa: N812


@dataclass
class ModulationOut:
    shift: torch.Tensor
    scale: torch.Tensor
    gate: torch.Tensor


def modulated(mod: ModulationOut, x: torch.Tensor) -> torch.Tensor:
    return (1 + mod.scale) * x + mod.shift


class DoubleStreamBlock(nn.Module):
    """img [B, N, D], txt [B, M, D], mod of vectors [B, 1, D], pe [B, 1, M+N, D/2, 2, 2]."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        for stream in ("img", "txt"):
            setattr(self, f"{stream}_attn", SelfAttention(dim, num_heads))
            setattr(self, f"{stream}_mlp", mlp(dim))
            for number in (1, 2):
                setattr(self, f"{stream}_norm{number}", nn.LayerNorm(dim, 1e-6, False))

    def forward(self, img: Any, txt: Any, mod: Any, pe: Any) -> Any:
        (img_mod1, img_mod2), (txt_mod1, txt_mod2) = mod
        img_qkv = self.img_attn.qkv(modulated(img_mod1, self.img_norm1(img)))
        txt_qkv = self.txt_attn.qkv(modulated(txt_mod1, self.txt_norm1(txt)))
        q, k, v = join_heads(
            (self.txt_attn.norm, split_heads(txt_qkv, self.num_heads)),
            (self.img_attn.norm, split_heads(img_qkv, self.num_heads)),
        )
        mixed = attention(q, k, v, pe=pe)
        txt_mixed, img_mixed = mixed[:, : txt.shape[1]], mixed[:, txt.shape[1] :]
        img = img + img_mod1.gate * self.img_attn.proj(img_mixed)
        img = img + img_mod2.gate * self.img_mlp(modulated(img_mod2, self.img_norm2(img)))
        txt = txt + txt_mod1.gate * self.txt_attn.proj(txt_mixed)
        txt = txt + txt_mod2.gate * self.txt_mlp(modulated(txt_mod2, self.txt_norm2(txt)))
        return img, txt


class SingleStreamBlock(nn.Module):
    """x [B, N, D], mod of vectors [B, 1, D], pe [B, 1, N, D/2, 2, 2] → x."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.hidden_size = num_heads, dim
        self.linear1, self.linear2 = ops.Linear(dim, 7 * dim), ops.Linear(5 * dim, dim)
        self.norm = QKNorm(dim // num_heads)
        self.pre_norm = nn.LayerNorm(dim, 1e-6, False)
        self.mlp_act = nn.GELU(approximate="tanh")

    def forward(self, x: Any, mod: Any, pe: Any) -> Any:
        inner = self.linear1(modulated(mod, self.pre_norm(x)))
        qkv, hidden = inner.split([3 * self.hidden_size, 4 * self.hidden_size], -1)
        q, k, v = split_heads(qkv, self.num_heads)
        mixed = attention(*self.norm(q, k, v), v, pe=pe)
        return x + mod.gate * self.linear2(torch.cat((mixed, self.mlp_act(hidden)), 2))


class IntegratedChromaTransformer2DModel(nn.Module):
    """x [B, 16, H, W], timestep [B], context [B, M, 24] → as x."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.in_channels = 64
        self.pe_embedder = EmbedND(WIDTH // HEADS)
        self.img_in, self.txt_in = ops.Linear(64, WIDTH), ops.Linear(24, WIDTH)
        self.guidance = nn.ModuleList([MLPEmbedder(32, WIDTH)])
        self.guidance_norm = RMSNorm(WIDTH)
        self.double_blocks = nn.ModuleList(DoubleStreamBlock(WIDTH, HEADS) for _ in range(depth))
        self.single_blocks = nn.ModuleList(SingleStreamBlock(WIDTH, HEADS) for _ in range(depth))
        self.final_layer = ops.Linear(WIDTH, 64)

    def forward(self, x: Any, timestep: Any, context: Any, **_: Any) -> Any:
        height, width = x.shape[-2:]
        x = F.pad(x, (0, width % PATCH, 0, height % PATCH), mode="circular")
        rows, columns = (side // PATCH for side in x.shape[-2:])
        img = self.img_in(F.unfold(x, PATCH, stride=PATCH).transpose(1, 2))
        doubles, singles = len(self.double_blocks), len(self.single_blocks)
        count = 12 * doubles + 3 * singles
        numbers = timestep_embedding(torch.arange(count), 16).to(img)
        times = timestep_embedding(timestep, 16)[:, None].expand(-1, count, -1)
        inputs = torch.cat([times, numbers.expand(len(x), -1, -1)], -1)
        vectors = self.guidance_norm(self.guidance[0](inputs))
        mods = [
            ModulationOut(*vectors[:, 3 * i : 3 * i + 3].split(1, 1)) for i in range(count // 3)
        ]
        pe = self.pe_embedder(positions(img, context.shape[1], rows, columns))
        txt = self.txt_in(context)
        for i, block in enumerate(self.double_blocks):
            four = mods[singles + 4 * i : singles + 4 * i + 4]
            img, txt = block(img=img, txt=txt, mod=[four[:2], four[2:]], pe=pe)
        img = torch.cat((txt, img), 1)
        for i, block in enumerate(self.single_blocks):
            img = block(img, mod=mods[i], pe=pe)
        img = self.final_layer(img[:, txt.shape[1] :]).transpose(1, 2)
        sides = (rows * PATCH, columns * PATCH)
        return F.fold(img, sides, PATCH, stride=PATCH)[..., :height, :width]
