"""Weights of small transformers in the layouts of their authors, as single files have them."""

from __future__ import annotations

import re
from typing import Any

import torch

Weights = dict[str, torch.Tensor]

_SD3 = {
    "pos_embed.proj.": "x_embedder.proj.",
    "pos_embed.pos_embed": "pos_embed",
    "time_text_embed.timestep_embedder.linear_1.": "t_embedder.mlp.0.",
    "time_text_embed.timestep_embedder.linear_2.": "t_embedder.mlp.2.",
    "time_text_embed.text_embedder.linear_1.": "y_embedder.mlp.0.",
    "time_text_embed.text_embedder.linear_2.": "y_embedder.mlp.2.",
    "norm_out.linear.": "final_layer.adaLN_modulation.1.",
    "proj_out.": "final_layer.linear.",
}
_SD3_BLOCK = {
    "attn.to_out.0.": "x_block.attn.proj.",
    "attn2.to_out.0.": "x_block.attn2.proj.",
    "attn.to_add_out.": "context_block.attn.proj.",
    "attn.norm_q.": "x_block.attn.ln_q.",
    "attn.norm_k.": "x_block.attn.ln_k.",
    "attn2.norm_q.": "x_block.attn2.ln_q.",
    "attn2.norm_k.": "x_block.attn2.ln_k.",
    "attn.norm_added_q.": "context_block.attn.ln_q.",
    "attn.norm_added_k.": "context_block.attn.ln_k.",
    "norm1.linear.": "x_block.adaLN_modulation.1.",
    "norm1_context.linear.": "context_block.adaLN_modulation.1.",
    "ff.net.0.proj.": "x_block.mlp.fc1.",
    "ff.net.2.": "x_block.mlp.fc2.",
    "ff_context.net.0.proj.": "context_block.mlp.fc1.",
    "ff_context.net.2.": "context_block.mlp.fc2.",
}
_SD3_STACKED = {
    ("attn.to_q.", "attn.to_k.", "attn.to_v."): "x_block.attn.qkv.",
    ("attn2.to_q.", "attn2.to_k.", "attn2.to_v."): "x_block.attn2.qkv.",
    ("attn.add_q_proj.", "attn.add_k_proj.", "attn.add_v_proj."): "context_block.attn.qkv.",
}


def sd3_file(transformer: Any) -> Weights:
    """Stable Diffusion 3's layout, with the prefix of whole checkpoints."""
    state, last = transformer.state_dict(), len(transformer.transformer_blocks) - 1
    found: Weights = {}
    for key, weight in state.items():
        inside = re.fullmatch(r"transformer_blocks\.(\d+)\.(.*)", key)
        if inside is None:
            name = _renamed(key, _SD3)
        else:
            number, rest = inside.groups()
            stacked = [(n, to) for n, to in _SD3_STACKED.items() if rest.startswith(n)]
            if stacked:
                (names, to) = stacked[0]
                end = rest.rpartition(".")[2]
                parts = [state[f"transformer_blocks.{number}.{n}{end}"] for n in names]
                name, weight = f"joint_blocks.{number}.{to}{end}", torch.cat(parts)
            else:
                name = f"joint_blocks.{number}.{_renamed(rest, _SD3_BLOCK)}"
        if key.startswith(("norm_out.", f"transformer_blocks.{last}.norm1_context.")):
            weight = torch.cat(weight.chunk(2)[::-1])  # shift before scale
        found[f"model.diffusion_model.{name}"] = weight.contiguous()
    return found


def z_image_file(transformer: Any) -> Weights:
    """Z-Image's layout: query, key and value are one."""
    found: Weights = {}
    for key, weight in transformer.state_dict().items():
        name = key.replace("all_final_layer.2-1.", "final_layer.")
        name = name.replace("all_x_embedder.2-1.", "x_embedder.").replace(".to_out.0.", ".out.")
        name = name.replace(".norm_q.", ".q_norm.").replace(".norm_k.", ".k_norm.")
        if ".attention.to_" in name:
            if ".to_q." not in name:
                continue
            names = (key.replace(".to_q.", f".to_{part}.") for part in "qkv")
            weight = torch.cat([transformer.state_dict()[each] for each in names])
            name = name.replace(".to_q.", ".qkv.")
        found[name] = weight.contiguous()
    return found


def diffusers_file(transformer: Any) -> Weights:
    """diffusers' own layout."""
    return {key: weight.contiguous() for key, weight in transformer.state_dict().items()}


def _renamed(key: str, table: dict[str, str]) -> str:
    for start, name in table.items():
        if key.startswith(start):
            return name + key.removeprefix(start)
    return key
