"""Stands for Neo's ``backend.nn.flux``: in place, with RoPE by another package's operator.

Blocks without a modulation of their own are those of Flux.2 and Chroma.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from backend.args import dynamic_args  # type: ignore[import-not-found]
from backend.attention import attention_function  # type: ignore[import-not-found]
from backend.operations import ForgeOperations as ops  # type: ignore[import-not-found]  # noqa: N813
from comfy_kitchen import apply_rope  # type: ignore[import-not-found]
from torch import nn
from torch.nn import functional as F  # noqa: N812

WIDTH, HEADS = 32, 2


def attention(
    q: Any, k: Any, v: Any, pe: Any, mask: Any = None, transformer_options: Any = None
) -> Any:
    q, k = apply_rope(q, k, pe)
    return attention_function(
        q, k, v, q.shape[1], skip_reshape=True, mask=mask, transformer_options=transformer_options
    )


@dataclass
class ModulationOut:
    shift: torch.Tensor
    scale: torch.Tensor
    gate: torch.Tensor


class EmbedND(nn.Module):
    """ids [B, N, 3] → [B, 1, N, D/2, 2, 2]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        angle = ids.sum(-1, keepdim=True) * 10.0 ** -torch.arange(self.dim // 2).to(ids)
        cos, sin = angle.cos(), angle.sin()
        return torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2)).unsqueeze(1)


class QKNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query_norm, self.key_norm = ops.RMSNorm(dim), ops.RMSNorm(dim)

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return self.query_norm(q).to(v), self.key_norm(k).to(v)


class SelfAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.qkv, self.proj = ops.Linear(dim, 3 * dim), ops.Linear(dim, dim)
        self.norm = QKNorm(dim // num_heads)


class Modulation(nn.Module):
    def __init__(self, dim: int, double: bool) -> None:
        super().__init__()
        self.is_double = double
        self.lin = ops.Linear(dim, (6 if double else 3) * dim)

    def forward(self, vec: torch.Tensor) -> tuple[ModulationOut, ModulationOut | None]:
        out = self.lin(F.silu(vec[:, None])).chunk(6 if self.is_double else 3, -1)
        return ModulationOut(*out[:3]), ModulationOut(*out[3:]) if self.is_double else None


def modulated(mod: ModulationOut, x: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(mod.shift, x, 1 + mod.scale)


def mlp(dim: int) -> nn.Sequential:
    return nn.Sequential(
        ops.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), ops.Linear(4 * dim, dim)
    )


def heads_of(qkv: torch.Tensor, heads: int) -> Any:
    return qkv.view(qkv.shape[0], qkv.shape[1], 3, heads, -1).permute(2, 0, 3, 1, 4)


class DoubleStreamBlock(nn.Module):
    """img [B, N, D], txt [B, M, D]; both are written into."""

    def __init__(self, dim: int, num_heads: int, modulation: bool = True) -> None:
        super().__init__()
        self.num_heads, self.modulation = num_heads, modulation
        for stream in ("img", "txt"):
            if modulation:
                setattr(self, f"{stream}_mod", Modulation(dim, double=True))
            setattr(self, f"{stream}_attn", SelfAttention(dim, num_heads))
            setattr(self, f"{stream}_mlp", mlp(dim))
            for number in (1, 2):
                setattr(self, f"{stream}_norm{number}", nn.LayerNorm(dim, 1e-6, False))

    def forward(
        self,
        img: torch.Tensor,
        txt: torch.Tensor,
        vec: Any,
        pe: Any,
        attn_mask: Any = None,
        modulation_dims_img: Any = None,
        modulation_dims_txt: Any = None,
        transformer_options: Any = None,
    ) -> Any:
        if self.modulation:
            vec = self.img_mod(vec), self.txt_mod(vec)
        (img_mod1, img_mod2), (txt_mod1, txt_mod2) = vec
        img_qkv = self.img_attn.qkv(modulated(img_mod1, self.img_norm1(img)))
        txt_qkv = self.txt_attn.qkv(modulated(txt_mod1, self.txt_norm1(txt)))
        img_q, img_k, img_v = heads_of(img_qkv, self.num_heads)
        txt_q, txt_k, txt_v = heads_of(txt_qkv, self.num_heads)
        img_q, img_k = self.img_attn.norm(img_q, img_k, img_v)
        txt_q, txt_k = self.txt_attn.norm(txt_q, txt_k, txt_v)
        q, k, v = (torch.cat(both, 2) for both in ((txt_q, img_q), (txt_k, img_k), (txt_v, img_v)))
        mixed = attention(q, k, v, pe, attn_mask, transformer_options)
        txt_mixed, img_mixed = mixed[:, : txt.shape[1]], mixed[:, txt.shape[1] :]
        img += img_mod1.gate * self.img_attn.proj(img_mixed)
        img += img_mod2.gate * self.img_mlp(modulated(img_mod2, self.img_norm2(img)))
        txt += txt_mod1.gate * self.txt_attn.proj(txt_mixed)
        txt += txt_mod2.gate * self.txt_mlp(modulated(txt_mod2, self.txt_norm2(txt)))
        return img, txt


class SingleStreamBlock(nn.Module):
    """x [B, N, D], which is written into."""

    def __init__(self, dim: int, num_heads: int, modulation: bool = True) -> None:
        super().__init__()
        self.num_heads, self.hidden_size = num_heads, dim
        self.linear1, self.linear2 = ops.Linear(dim, 7 * dim), ops.Linear(5 * dim, dim)
        self.norm = QKNorm(dim // num_heads)
        self.pre_norm = nn.LayerNorm(dim, 1e-6, False)
        self.mlp_act = nn.GELU(approximate="tanh")
        self.modulation = Modulation(dim, double=False) if modulation else None

    def forward(
        self,
        x: torch.Tensor,
        vec: Any,
        pe: Any,
        attn_mask: Any = None,
        modulation_dims: Any = None,
        transformer_options: Any = None,
    ) -> Any:
        mod = self.modulation(vec)[0] if self.modulation else vec
        inner = self.linear1(modulated(mod, self.pre_norm(x)))
        qkv, hidden = inner.split([3 * self.hidden_size, 4 * self.hidden_size], -1)
        q, k, v = heads_of(qkv, self.num_heads)
        q, k = self.norm(q, k, v)
        mixed = attention(q, k, v, pe, attn_mask, transformer_options)
        x += mod.gate * self.linear2(torch.cat((mixed, self.mlp_act(hidden)), 2))
        return x


class IntegratedFluxTransformer2DModel(nn.Module):
    """x [B, 16, H, W], timestep [B], context [B, M, 24] → as x.

    Args:
        depth: Blocks of each kind.
        global_modulation: As in Flux.2: one for all blocks.
    """

    def __init__(self, depth: int = 2, global_modulation: bool = False) -> None:
        super().__init__()
        self.in_channels, self.patch_size, self.vec_in_dim = 64, 2, 20
        self.guidance_embed = not global_modulation
        self.pe_embedder = EmbedND(WIDTH // HEADS)
        self.img_in, self.txt_in = ops.Linear(64, WIDTH), ops.Linear(24, WIDTH)
        self.time_in, self.vector_in = ops.Linear(1, WIDTH), ops.Linear(20, WIDTH)
        own = not global_modulation
        self.double_blocks = nn.ModuleList(
            DoubleStreamBlock(WIDTH, HEADS, own) for _ in range(depth)
        )
        self.single_blocks = nn.ModuleList(
            SingleStreamBlock(WIDTH, HEADS, own) for _ in range(depth)
        )
        if global_modulation:
            self.double_stream_modulation_img = Modulation(WIDTH, double=True)
            self.double_stream_modulation_txt = Modulation(WIDTH, double=True)
            self.single_stream_modulation = Modulation(WIDTH, double=False)
        self.global_modulation = global_modulation
        self.final_layer = ops.Linear(WIDTH, 64)

    def forward(
        self,
        x: Any,
        timestep: Any,
        context: Any,
        y: Any = None,
        guidance: Any = None,
        control: Any = None,
        transformer_options: Any = None,
        **_: Any,
    ) -> Any:
        height, width = x.shape[-2:]
        x = F.pad(x, (0, width % 2, 0, height % 2), mode="circular")
        rows, columns = (side // 2 for side in x.shape[-2:])
        img, txt = self.img_in(F.unfold(x, 2, stride=2).transpose(1, 2)), self.txt_in(context)
        tokens = img.shape[1]
        for picture in dynamic_args.ref_latents or ():
            more = self.img_in(F.unfold(picture, 2, stride=2).transpose(1, 2))
            img = torch.cat([img, more.expand(len(img), -1, -1)], 1)
        ids = img.new_zeros(len(img), txt.shape[1] + img.shape[1], 3)
        ids[:, txt.shape[1] :, 1] = torch.arange(img.shape[1]).to(ids)
        pe, vec = self.pe_embedder(ids), self.time_in(timestep[:, None]) + self.vector_in(y)
        if guidance is not None:
            vec = vec + guidance[:, None]
        mods = vec
        if self.global_modulation:
            mods = (self.double_stream_modulation_img(vec), self.double_stream_modulation_txt(vec))
        for index, block in enumerate(self.double_blocks):
            transformer_options["block_index"] = index
            img, txt = block(
                img=img,
                txt=txt,
                vec=mods,
                pe=pe,
                attn_mask=None,
                transformer_options=transformer_options,
            )
        img = torch.cat((txt, img), 1)
        if self.global_modulation:
            vec, _nothing = self.single_stream_modulation(vec)
        for index, block in enumerate(self.single_blocks):
            transformer_options["block_index"] = index
            img = block(
                img, vec=vec, pe=pe, attn_mask=None, transformer_options=transformer_options
            )
        img = self.final_layer(img[:, txt.shape[1] :][:, :tokens]).transpose(1, 2)
        return F.fold(img, (rows * 2, columns * 2), 2, stride=2)[..., :height, :width]
