"""Stands for Forge's ``backend.nn.flux``: out of place, with norms that cast their own weights."""

from __future__ import annotations

from typing import Any

import torch
from backend.attention import attention_function  # type: ignore[import-not-found]
from backend.operations import ForgeOperations as ops  # type: ignore[import-not-found]  # noqa: N813
from torch import nn
from torch.nn import functional as F  # noqa: N812

WIDTH, HEADS = 32, 2
PATCH = 2


def attention(q: Any, k: Any, v: Any, pe: Any) -> Any:
    q, k = apply_rope(q, k, pe)
    return attention_function(q, k, v, q.shape[1], skip_reshape=True)


def apply_rope(q: Any, k: Any, pe: Any) -> Any:
    """q, k [B, heads, N, D], pe [B, 1, N, D/2, 2, 2]."""
    turned = []
    for x in (q, k):
        pairs = x.float().reshape(*x.shape[:-1], -1, 2, 1)
        turned.append((pe @ pairs).reshape(x.shape).to(x.dtype))
    return turned


class EmbedND(nn.Module):
    """ids [B, N, 3] → [B, 1, N, D/2, 2, 2]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        angle = ids.sum(-1, keepdim=True) * 10.0 ** -torch.arange(self.dim // 2).to(ids)
        cos, sin = angle.cos(), angle.sin()
        rows = torch.stack([cos, -sin, sin, cos], -1)
        return rows.unflatten(-1, (2, 2)).unsqueeze(1).float()


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = None
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, dim))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale.dtype != x.dtype:
            self.scale = nn.Parameter(self.scale.to(x.dtype), requires_grad=False)
        return F.rms_norm(x, (x.shape[-1],), self.scale, self.eps)


class QKNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query_norm, self.key_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return self.query_norm(q), self.key_norm(k)


class SelfAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.qkv, self.proj = ops.Linear(dim, 3 * dim), ops.Linear(dim, dim)
        self.norm = QKNorm(dim // num_heads)


class Modulation(nn.Module):
    def __init__(self, dim: int, double: bool) -> None:
        super().__init__()
        self.multiplier = 6 if double else 3
        self.lin = ops.Linear(dim, self.multiplier * dim)

    def forward(self, vec: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.lin(F.silu(vec))[:, None].chunk(self.multiplier, -1)  # type: ignore[no-any-return]


def mlp(dim: int) -> nn.Sequential:
    return nn.Sequential(
        ops.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), ops.Linear(4 * dim, dim)
    )


def split_heads(qkv: torch.Tensor, heads: int) -> Any:
    """[B, N, 3D] → three times [B, heads, N, D/heads]."""
    return qkv.view(*qkv.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)


def join_heads(*parts: Any) -> Any:
    """Norms, each with q, k and v of its stream → q, k, v of all streams."""
    normed = [(*norm(q, k, v), v) for norm, (q, k, v) in parts]
    return [torch.cat(streams, 2) for streams in zip(*normed, strict=True)]


def positions(img: torch.Tensor, text: int, rows: int, columns: int) -> torch.Tensor:
    """Of text and image tokens: [B, M+N, 3]."""
    ids = img.new_zeros(len(img), text + rows * columns, 3)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).to(ids)
    ids[:, text:, 1:] = places
    return ids


class DoubleStreamBlock(nn.Module):
    """img [B, N, D], txt [B, M, D], vec [B, D], pe [B, 1, M+N, D/2, 2, 2] → img, txt."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        for stream in ("img", "txt"):
            setattr(self, f"{stream}_mod", Modulation(dim, double=True))
            setattr(self, f"{stream}_attn", SelfAttention(dim, num_heads))
            setattr(self, f"{stream}_mlp", mlp(dim))
            for number in (1, 2):
                setattr(self, f"{stream}_norm{number}", nn.LayerNorm(dim, 1e-6, False))

    def forward(self, img: Any, txt: Any, vec: Any, pe: Any) -> Any:
        mods = [self.txt_mod(vec), self.img_mod(vec)]
        txt_qkv = self.txt_attn.qkv((1 + mods[0][1]) * self.txt_norm1(txt) + mods[0][0])
        img_qkv = self.img_attn.qkv((1 + mods[1][1]) * self.img_norm1(img) + mods[1][0])
        q, k, v = join_heads(
            (self.txt_attn.norm, split_heads(txt_qkv, self.num_heads)),
            (self.img_attn.norm, split_heads(img_qkv, self.num_heads)),
        )
        mixed = attention(q, k, v, pe=pe)
        txt_mixed, img_mixed = mixed[:, : txt.shape[1]], mixed[:, txt.shape[1] :]
        txt = txt + mods[0][2] * self.txt_attn.proj(txt_mixed)
        txt = txt + mods[0][5] * self.txt_mlp((1 + mods[0][4]) * self.txt_norm2(txt) + mods[0][3])
        img = img + mods[1][2] * self.img_attn.proj(img_mixed)
        img = img + mods[1][5] * self.img_mlp((1 + mods[1][4]) * self.img_norm2(img) + mods[1][3])
        return img, txt


class SingleStreamBlock(nn.Module):
    """x [B, N, D], vec [B, D], pe [B, 1, N, D/2, 2, 2] → x."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.hidden_size = num_heads, dim
        self.linear1, self.linear2 = ops.Linear(dim, 7 * dim), ops.Linear(5 * dim, dim)
        self.norm = QKNorm(dim // num_heads)
        self.pre_norm = nn.LayerNorm(dim, 1e-6, False)
        self.mlp_act = nn.GELU(approximate="tanh")
        self.modulation = Modulation(dim, double=False)

    def forward(self, x: Any, vec: Any, pe: Any) -> Any:
        shift, scale, gate = self.modulation(vec)
        inner = self.linear1((1 + scale) * self.pre_norm(x) + shift)
        qkv, hidden = inner.split([3 * self.hidden_size, 4 * self.hidden_size], -1)
        q, k, v = split_heads(qkv, self.num_heads)
        mixed = attention(*self.norm(q, k, v), v, pe=pe)
        return x + gate * self.linear2(torch.cat((mixed, self.mlp_act(hidden)), 2))


class MLPEmbedder(nn.Module):
    def __init__(self, in_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.in_layer, self.out_layer = (
            ops.Linear(in_dim, hidden_dim),
            ops.Linear(hidden_dim, hidden_dim),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_layer(F.silu(self.in_layer(x)))  # type: ignore[no-any-return]


def timestep_embedding(t: torch.Tensor, dim: int, time_factor: float = 1000.0) -> torch.Tensor:
    steps = torch.arange(dim // 2, dtype=torch.float32, device=t.device)
    args = time_factor * t[:, None].float() * torch.exp(-9.2 * steps / (dim // 2))[None]
    return torch.cat([args.cos(), args.sin()], -1)


class IntegratedFluxTransformer2DModel(nn.Module):
    """x [B, 16, H, W], timestep [B], context [B, M, 24], y [B, 20], guidance [B] → as x."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.in_channels, self.guidance_embed = 64, True
        self.pe_embedder = EmbedND(WIDTH // HEADS)
        self.img_in, self.txt_in = ops.Linear(64, WIDTH), ops.Linear(24, WIDTH)
        self.time_in, self.vector_in = MLPEmbedder(16, WIDTH), MLPEmbedder(20, WIDTH)
        self.guidance_in = MLPEmbedder(16, WIDTH)
        self.double_blocks = nn.ModuleList(DoubleStreamBlock(WIDTH, HEADS) for _ in range(depth))
        self.single_blocks = nn.ModuleList(SingleStreamBlock(WIDTH, HEADS) for _ in range(depth))
        self.final_layer = ops.Linear(WIDTH, 64)

    def forward(
        self, x: Any, timestep: Any, context: Any, y: Any, guidance: Any = None, **_: Any
    ) -> Any:
        height, width = x.shape[-2:]
        x = F.pad(x, (0, width % PATCH, 0, height % PATCH), mode="circular")
        rows, columns = (side // PATCH for side in x.shape[-2:])
        img = self.img_in(F.unfold(x, PATCH, stride=PATCH).transpose(1, 2))
        vec = self.time_in(timestep_embedding(timestep, 16)) + self.vector_in(y)
        vec = vec + self.guidance_in(timestep_embedding(guidance, 16))
        pe = self.pe_embedder(positions(img, context.shape[1], rows, columns))
        txt = self.txt_in(context)
        for block in self.double_blocks:
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe)
        img = torch.cat((txt, img), 1)
        for block in self.single_blocks:
            img = block(img, vec=vec, pe=pe)
        img = self.final_layer(img[:, txt.shape[1] :]).transpose(1, 2)
        return F.fold(img, (rows * PATCH, columns * PATCH), PATCH, stride=PATCH)[
            ..., :height, :width
        ]
