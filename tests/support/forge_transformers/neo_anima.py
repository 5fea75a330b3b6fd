"""Stands for Neo's ``backend.nn.anima``: tokens keep frames, rows and columns.

Attention is in methods beside the forward, which call globals of this module. In float16, the
residual stream is in float32.
"""

from __future__ import annotations

from typing import Any

import comfy_kitchen as ck  # type: ignore[import-not-found]
import torch
from backend.attention import attention_function  # type: ignore[import-not-found]
from backend.operations import ForgeOperations as ops  # type: ignore[import-not-found]  # noqa: N813
from torch import nn
from torch.nn import functional as F  # noqa: N812

WIDTH, HEADS, CONTEXT = 32, 2, 24


class SelfCrossAttention(nn.Module):
    def __init__(self, context: int | None = None) -> None:
        super().__init__()
        self.is_SelfAttn = context is None
        self.q_proj = ops.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = ops.Linear(context or WIDTH, WIDTH, bias=False)
        self.v_proj = ops.Linear(context or WIDTH, WIDTH, bias=False)
        self.output_proj = ops.Linear(WIDTH, WIDTH, bias=False)
        self.q_norm, self.k_norm = ops.RMSNorm(WIDTH // HEADS), ops.RMSNorm(WIDTH // HEADS)

    def compute_qkv(self, x: Any, context: Any, rope_emb: Any) -> tuple[Any, ...]:
        context = x if context is None else context
        q, k, v = (
            layer(given).unflatten(-1, (HEADS, -1))
            for layer, given in ((self.q_proj, x), (self.k_proj, context), (self.v_proj, context))
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if self.is_SelfAttn and rope_emb is not None:
            q, k = ck.apply_rope_split_half(q, k, rope_emb)
        return q, k, v

    @staticmethod
    def torch_attention_op(q: Any, k: Any, v: Any, transformer_options: Any = None) -> Any:
        q, k, v = (t.reshape(q.shape[0], -1, *t.shape[-2:]).transpose(1, 2) for t in (q, k, v))
        return attention_function(
            q, k, v, HEADS, skip_reshape=True, transformer_options=transformer_options
        )

    def forward(
        self, x: Any, context: Any = None, rope_emb: Any = None, transformer_options: Any = None
    ) -> Any:
        q, k, v = self.compute_qkv(x, context, rope_emb)
        return self.output_proj(self.torch_attention_op(q, k, v, transformer_options))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = SelfCrossAttention(), SelfCrossAttention(CONTEXT)
        self.layer_norm_self_attn = nn.LayerNorm(WIDTH, 1e-6, False)
        self.layer_norm_cross_attn = nn.LayerNorm(WIDTH, 1e-6, False)
        self.adaln_modulation_self_attn = nn.Sequential(
            nn.SiLU(), ops.Linear(WIDTH, 8, bias=False), ops.Linear(8, 3 * WIDTH, bias=False)
        )

    def forward(
        self,
        x_B_T_H_W_D: Any,  # noqa: N803
        emb_B_T_D: Any,  # noqa: N803
        crossattn_emb: Any,
        rope_emb_L_1_1_D: Any = None,  # noqa: N803
        adaln_lora_B_T_3D: Any = None,  # noqa: N803
        extra_per_block_pos_emb: Any = None,
        transformer_options: Any = None,
    ) -> Any:
        modulation = self.adaln_modulation_self_attn(emb_B_T_D) + adaln_lora_B_T_3D
        shift, scale, gate = modulation[:, :, None, None].chunk(3, -1)
        x, size, dtype = x_B_T_H_W_D, x_B_T_H_W_D.shape, emb_B_T_D.dtype
        tokens = (self.layer_norm_self_attn(x) * (1 + scale) + shift).to(dtype).flatten(1, 3)
        mixed = self.self_attn(
            tokens, None, rope_emb_L_1_1_D, transformer_options=transformer_options
        )
        x = torch.addcmul(x, gate.to(x.dtype), mixed.reshape(size).to(x.dtype))
        tokens = self.layer_norm_cross_attn(x).to(dtype).flatten(1, 3)
        mixed = self.cross_attn(tokens, crossattn_emb, transformer_options=transformer_options)
        return x + mixed.reshape(size).to(x.dtype)


class Anima(nn.Module):
    """x [B, 16, T, H, W] with even sides, timesteps [B], context [B, 1, M, 24] → as x."""

    def __init__(self) -> None:
        super().__init__()
        self.out_channels = 16
        self.x_embedder, self.t_embedder = ops.Linear(64, WIDTH), ops.Linear(1, WIDTH)
        self.adaln = ops.Linear(1, 3 * WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.final_layer = ops.Linear(WIDTH, 64)

    def forward(
        self,
        x: Any,
        timesteps: Any,
        context: Any,
        padding_mask: Any = None,
        transformer_options: Any = None,
        **_: Any,
    ) -> Any:
        batch, _, frames, height, width = x.shape
        cells = x.transpose(1, 2).flatten(0, 1)
        tokens = F.unfold(cells, 2, stride=2).transpose(1, 2)
        tokens = tokens.reshape(batch, frames, height // 2, width // 2, -1)
        tokens, times = self.x_embedder(tokens), timesteps[:, None, None].to(x.dtype)
        count = frames * (height // 2) * (width // 2)
        angle = torch.arange(count)[:, None] * 0.1 ** torch.arange(WIDTH // HEADS // 2)
        cos, sin = angle.cos(), angle.sin()
        table = torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2)).to(x.device)
        if tokens.dtype is torch.float16:
            tokens = tokens.float()
        for block in self.blocks:
            tokens = block(
                tokens,
                self.t_embedder(times),
                context,
                rope_emb_L_1_1_D=table[None, :, None],
                adaln_lora_B_T_3D=self.adaln(times),
                extra_per_block_pos_emb=None,
                transformer_options=transformer_options or {},
            )
        cells = (
            self.final_layer(tokens.to(context.dtype)).flatten(0, 1).flatten(1, 2).transpose(1, 2)
        )
        found = F.fold(cells, (height, width), 2, stride=2)
        return found.unflatten(0, (batch, frames)).transpose(1, 2)
