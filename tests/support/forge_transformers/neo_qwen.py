"""Stands for Neo's ``backend.nn.qwen``: pictures with a dim for frames, text first in a block."""

from __future__ import annotations

from typing import Any

import torch
from backend.attention import attention_function  # type: ignore[import-not-found]
from backend.nn.flux import EmbedND  # type: ignore[import-not-found]
from backend.operations import ForgeOperations as ops  # type: ignore[import-not-found]  # noqa: N813
from torch import nn
from torch.nn import functional as F  # noqa: N812

WIDTH, HEADS = 32, 2


def rotated(x: Any, table: Any) -> Any:
    pairs = x.reshape(*x.shape[:-1], -1, 1, 2)
    return (table[..., 0] * pairs[..., 0] + table[..., 1] * pairs[..., 1]).reshape(*x.shape)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
            setattr(self, name, ops.Linear(WIDTH, WIDTH))
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            setattr(self, name, ops.RMSNorm(WIDTH // HEADS))
        self.to_out = nn.ModuleList([ops.Linear(WIDTH, WIDTH), nn.Dropout(0.0)])
        self.to_add_out = ops.Linear(WIDTH, WIDTH)

    def forward(
        self,
        hidden_states: Any,
        encoder_hidden_states: Any,
        encoder_hidden_states_mask: Any = None,
        attention_mask: Any = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        text, image = (
            [layer(stream).unflatten(-1, (self.heads, -1)) for layer in layers]
            for stream, layers in (
                (encoder_hidden_states, (self.add_q_proj, self.add_k_proj, self.add_v_proj)),
                (hidden_states, (self.to_q, self.to_k, self.to_v)),
            )
        )
        q = torch.cat([self.norm_added_q(text[0]), self.norm_q(image[0])], 1)
        k = torch.cat([self.norm_added_k(text[1]), self.norm_k(image[1])], 1)
        v = torch.cat([text[2], image[2]], 1)
        q, k = rotated(q, image_rotary_emb), rotated(k, image_rotary_emb)
        mixed = attention_function(
            q.flatten(2), k.flatten(2), v.flatten(2), self.heads, attention_mask
        )
        tokens = encoder_hidden_states.shape[1]
        image_mixed = self.to_out[1](self.to_out[0](mixed[:, tokens:]))
        return image_mixed, self.to_add_out(mixed[:, :tokens])


class QwenImageTransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        for stream in ("img", "txt"):
            setattr(self, f"{stream}_mod", nn.Sequential(nn.SiLU(), ops.Linear(WIDTH, 3 * WIDTH)))
            setattr(self, f"{stream}_norm1", nn.LayerNorm(WIDTH, 1e-6, False))

    def forward(
        self,
        hidden_states: Any,
        encoder_hidden_states: Any,
        encoder_hidden_states_mask: Any,
        temb: Any,
        image_rotary_emb: Any = None,
    ) -> Any:
        image, text = self.img_mod(temb)[:, None], self.txt_mod(temb)[:, None]
        image, text = image.chunk(3, -1), text.chunk(3, -1)
        image_mixed, text_mixed = self.attn(
            hidden_states=torch.addcmul(image[0], self.img_norm1(hidden_states), 1 + image[1]),
            encoder_hidden_states=torch.addcmul(
                text[0], self.txt_norm1(encoder_hidden_states), 1 + text[1]
            ),
            encoder_hidden_states_mask=encoder_hidden_states_mask,
            image_rotary_emb=image_rotary_emb,
        )
        return encoder_hidden_states + text[2] * text_mixed, hidden_states + image[2] * image_mixed


class QwenImageTransformer2DModel(nn.Module):
    """x [B, 16, 1, H, W] with even sides, timesteps [B], context [B, M, 24] → as x."""

    def __init__(self) -> None:
        super().__init__()
        self.in_channels = 64
        self.pe_embedder = EmbedND(WIDTH // HEADS)
        self.img_in, self.txt_in = ops.Linear(64, WIDTH), ops.Linear(24, WIDTH)
        self.time_text_embed = ops.Linear(1, WIDTH)
        self.transformer_blocks = nn.ModuleList(QwenImageTransformerBlock() for _ in range(3))
        self.proj_out = ops.Linear(WIDTH, 64)

    def forward(
        self,
        x: Any,
        timesteps: Any,
        context: Any,
        attention_mask: Any = None,
        transformer_options: Any = None,
        **_: Any,
    ) -> Any:
        size = x.shape[3:]
        image = self.img_in(F.unfold(x.squeeze(2), 2, stride=2).transpose(1, 2))
        text, temb = self.txt_in(context), self.time_text_embed(timesteps[:, None])
        ids = torch.arange(text.shape[1] + image.shape[1]).to(image)[None, :, None]
        table = self.pe_embedder(ids.expand(len(x), -1, 3)).squeeze(1).unsqueeze(2)
        for block in self.transformer_blocks:
            text, image = block(
                hidden_states=image,
                encoder_hidden_states=text,
                encoder_hidden_states_mask=attention_mask,
                temb=temb,
                image_rotary_emb=table,
            )
        image = self.proj_out(image).transpose(1, 2)
        return F.fold(image, size, 2, stride=2).unsqueeze(2)
