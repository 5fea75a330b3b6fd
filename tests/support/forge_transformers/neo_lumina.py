"""Stands for Neo's ``backend.nn.lumina``: the model, and refiners of image and text."""

from __future__ import annotations

from typing import Any

import torch
from backend.attention import attention_function  # type: ignore[import-not-found]
from backend.nn.flux import EmbedND, apply_rope  # type: ignore[import-not-found]
from backend.operations import ForgeOperations as ops  # type: ignore[import-not-found]  # noqa: N813
from torch import nn
from torch.nn import functional as F  # noqa: N812

WIDTH, HEADS, KV_HEADS = 32, 2, 1


class JointAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.qkv = ops.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * self.head_dim, bias=False)
        self.out = ops.Linear(WIDTH, WIDTH, bias=False)
        self.q_norm, self.k_norm = ops.RMSNorm(self.head_dim), ops.RMSNorm(self.head_dim)

    def forward(self, x: Any, x_mask: Any, freqs_cis: Any, transformer_options: Any = None) -> Any:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 2)
        q, k = apply_rope(self.q_norm(q), self.k_norm(k), freqs_cis)
        k, v = (t.repeat(1, 1, HEADS // KV_HEADS, 1) for t in (k, v))
        mixed = attention_function(
            *(t.movedim(1, 2) for t in (q, k, v)),
            HEADS,
            x_mask,
            skip_reshape=True,
            transformer_options=transformer_options,
        )
        return self.out(mixed)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = ops.Linear(WIDTH, 64, bias=False), ops.Linear(WIDTH, 64, bias=False)
        self.w2 = ops.Linear(64, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class JointTransformerBlock(nn.Module):
    def __init__(self, layer_id: int, modulation: bool = True) -> None:
        super().__init__()
        self.layer_id, self.modulation = layer_id, modulation
        self.attention, self.feed_forward = JointAttention(), FeedForward()
        self.attention_norm1, self.ffn_norm1 = ops.RMSNorm(WIDTH), ops.RMSNorm(WIDTH)
        if modulation:
            self.adaLN_modulation = nn.Sequential(nn.SiLU(), ops.Linear(WIDTH, 4 * WIDTH))

    def forward(
        self,
        x: Any,
        x_mask: Any,
        freqs_cis: Any,
        adaln_input: Any = None,
        transformer_options: Any = None,
    ) -> Any:
        one = torch.ones(())
        scale, gate, last_scale, last_gate = one * 0, one, one * 0, one
        if self.modulation:
            vectors = self.adaLN_modulation(adaln_input)[:, None]
            scale, gate, last_scale, last_gate = vectors.chunk(4, -1)
        normed = self.attention_norm1(x) * (1 + scale)
        x = x + gate.tanh() * self.attention(normed, x_mask, freqs_cis, transformer_options)
        return x + last_gate.tanh() * self.feed_forward(self.ffn_norm1(x) * (1 + last_scale))


class NextDiT(nn.Module):
    """x [B, 16, H, W] with even sides, timesteps [B], context [B, M, 24] → as x."""

    def __init__(self) -> None:
        super().__init__()
        self.in_channels = 16
        self.x_embedder = ops.Linear(64, WIDTH)
        self.cap_embedder = nn.Sequential(ops.RMSNorm(24), ops.Linear(24, WIDTH))
        self.t_embedder = ops.Linear(1, WIDTH)
        self.context_refiner = nn.ModuleList([JointTransformerBlock(0, modulation=False)])
        self.noise_refiner = nn.ModuleList([JointTransformerBlock(0)])
        self.layers = nn.ModuleList(JointTransformerBlock(i) for i in range(2))
        self.rope_embedder = EmbedND(WIDTH // HEADS)
        self.final_layer = ops.Linear(WIDTH, 64)

    def forward(
        self, x: Any, timesteps: Any, context: Any, transformer_options: Any = None, **_: Any
    ) -> Any:
        size = x.shape[2:]
        text, image = self.cap_embedder(context), F.unfold(x, 2, stride=2).transpose(1, 2)
        image, t = self.x_embedder(image), self.t_embedder(timesteps[:, None])
        tokens = text.shape[1]
        ids = torch.arange(tokens + image.shape[1]).to(image)[None, :, None]
        freqs = self.rope_embedder(ids.expand(len(x), -1, 3)).movedim(1, 2)
        for layer in self.context_refiner:
            text = layer(text, None, freqs[:, :tokens], transformer_options=transformer_options)
        for layer in self.noise_refiner:
            image = layer(
                image, None, freqs[:, tokens:], t, transformer_options=transformer_options
            )
        both = torch.cat((text, image), 1)
        for layer in self.layers:
            both = layer(both, None, freqs, t, transformer_options=transformer_options)
        return -F.fold(self.final_layer(both[:, tokens:]).transpose(1, 2), size, 2, stride=2)
