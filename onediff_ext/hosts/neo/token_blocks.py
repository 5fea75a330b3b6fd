"""The blocks of Neo's transformer models (DiT).

Source: backend/nn/flux.py, lumina.py and qwen.py of Neo 2.26.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from onediff_ext.engine.blocks.argument_parts import JOINT, Members
from onediff_ext.engine.blocks.family import (
    CONTEXT,
    TOKENS,
    UNKNOWN_ARGUMENTS,
    VECTOR,
    Arguments,
    BlockCall,
    Dims,
    Refusal,
    Statics,
    Tensors,
)
from onediff_ext.engine.quantization import EightBitLinears
from onediff_ext.engine.validity.foreign_code import defining_module
from onediff_ext.hosts.forge_attention import AttentionRules
from onediff_ext.hosts.forge_blocks import ForgePackage
from onediff_ext.hosts.forge_token_blocks import (
    FluxDouble,
    FluxSingle,
    ForgeTokenBlocks,
    apply_rope_split_half,
)

# A RoPE table has a 2x2 matrix for each pair of channels: [B, N, 1, D/2, 2, 2].
_TABLE: Dims = ("batch", "tokens", None, None, None, None)
# Tokens of pictures in frames: [B, T, H, W, D].
_FRAMES: Dims = ("batch", None, "height", "width", None)
_ROPE = "apply_rope_split_half"
_TABLE_DIMS = 8  # of Anima's table with the dims of frames
_JOINT_TABLE: Dims = ("batch", JOINT, None, None, None, None)


class _NeoBlocks(ForgeTokenBlocks):
    """Blocks of Neo, whose models read pictures to edit from a global of the process."""

    def global_settings(self) -> Hashable:
        arguments = getattr(sys.modules.get("backend.args"), "dynamic_args", None)
        # A CUDA graph would go on reading the pictures that it was recorded with.
        return object() if getattr(arguments, "ref_latents", None) else None


class NeoDouble(FluxDouble, _NeoBlocks):
    """Neo's block with two streams: of Flux.1, Flux.2 and Chroma."""

    mutates_inputs = True
    arguments = (
        "img",
        "txt",
        "vec",
        "pe",
        "attn_mask",
        "modulation_dims_img",
        "modulation_dims_txt",
        "transformer_options",
    )
    neglected = ("transformer_options",)


class NeoSingle(FluxSingle, _NeoBlocks):
    """Neo's block on the tokens of text and image: of Flux.1, Flux.2 and Chroma."""

    mutates_inputs = True
    arguments = ("x", "vec", "pe", "attn_mask", "modulation_dims", "transformer_options")
    neglected = ("transformer_options",)


class LuminaBlock(_NeoBlocks):
    """The block of Lumina 2 and Z-Image: of the model, and of the refiners of image and text."""

    home = attends_in = "backend.nn.lumina"
    class_name = "JointTransformerBlock"
    arguments = ("x", "x_mask", "freqs_cis", "adaln_input", "transformer_options")
    neglected = ("transformer_options",)
    streams: Mapping[str, Dims] = {"x": TOKENS}
    dims: Mapping[str, Dims | Members] = {"freqs_cis": _TABLE, "adaln_input": VECTOR}
    outputs = ("x",)
    redundant_attrs = frozenset({"layer_id"})
    eight_bits = EightBitLinears(
        together=(("feed_forward.w1", "feed_forward.w3"),),
        exact=("adaLN_modulation.0", "adaLN_modulation.1"),
    )


class QwenImageBlock(_NeoBlocks):
    """Qwen-Image's block. It does not read its mask."""

    home = attends_in = "backend.nn.qwen"
    class_name = "QwenImageTransformerBlock"
    arguments = (
        "hidden_states",
        "encoder_hidden_states",
        "encoder_hidden_states_mask",
        "temb",
        "image_rotary_emb",
    )
    neglected = ("encoder_hidden_states_mask",)
    streams: Mapping[str, Dims] = {"hidden_states": TOKENS, "encoder_hidden_states": CONTEXT}
    dims: Mapping[str, Dims | Members] = {"temb": VECTOR, "image_rotary_emb": _JOINT_TABLE}
    outputs = ("encoder_hidden_states", "hidden_states")
    eight_bits = EightBitLinears(
        together=(
            ("attn.to_q", "attn.to_k", "attn.to_v"),
            ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        ),
        exact=("img_mod.1", "txt_mod.1"),
    )


class AnimaBlock(_NeoBlocks):
    """Anima's block, on tokens that keep the dims of frames, rows and columns.

    Its RoPE table has one matrix for each of them in a row, so that it takes their dims, too.
    """

    home = attends_in = "backend.nn.anima"
    class_name = "Block"
    arguments = (
        "x_B_T_H_W_D",
        "emb_B_T_D",
        "crossattn_emb",
        "rope_emb_L_1_1_D",
        "adaln_lora_B_T_3D",
        "extra_per_block_pos_emb",
        "transformer_options",
    )
    neglected = ("transformer_options",)
    streams: Mapping[str, Dims] = {"x_B_T_H_W_D": _FRAMES}
    dims: Mapping[str, Dims | Members] = {
        "emb_B_T_D": ("batch", None, None),
        "crossattn_emb": CONTEXT,
        "rope_emb_L_1_1_D": (None, None, "height", "width", None, None, None, None),
        "adaln_lora_B_T_3D": ("batch", None, None),
    }
    outputs = ("x_B_T_H_W_D",)
    eight_bits = EightBitLinears(
        exact=tuple(
            f"adaln_modulation_{name}.{number}"
            for name in ("self_attn", "cross_attn", "mlp")
            for number in (1, 2)
        )
    )
    functions: Mapping[str, Any] = {"ck": SimpleNamespace(**{_ROPE: apply_rope_split_half})}

    def __init__(self, package: ForgePackage, attention: AttentionRules) -> None:
        super().__init__(package, attention)
        self.label = "AnimaBlock"  # the name of the class says little

    def eager_reason(self, block: Any, arguments: Arguments) -> str | None:
        # The host looks for the function in its package at each call.
        kitchen = getattr(sys.modules[self.home], "ck", None)
        home = defining_module(getattr(kitchen, _ROPE, None))
        if home.partition(".")[0] != "comfy_kitchen":
            return f"comfy_kitchen's {_ROPE} is another extension's"
        return super().eager_reason(block, arguments)

    def sort(self, block: Any, arguments: Arguments) -> BlockCall | Refusal:
        names = ("x_B_T_H_W_D", "rope_emb_L_1_1_D", "crossattn_emb")
        x, table, context = (arguments.get(name) for name in names)
        if not (
            isinstance(x, torch.Tensor)
            and isinstance(table, torch.Tensor)
            and isinstance(context, torch.Tensor)
        ):
            return UNKNOWN_ARGUMENTS
        if x.ndim != 5 or table.ndim != 6 or table.shape[1] != math.prod(x.shape[1:4]):
            return UNKNOWN_ARGUMENTS
        if context.ndim == 4 and context.shape[1] == 1:  # as the host's prompts are
            context = context.squeeze(1)
        table = table.reshape(table.shape[0], *x.shape[1:4], *table.shape[2:])
        changed = {"rope_emb_L_1_1_D": table, "crossattn_emb": context}
        return super().sort(block, {**arguments, **changed})

    def run(self, block: Any, tensors: Tensors, statics: Statics) -> Any:
        given = [t.flatten(1, 3) if t.ndim == _TABLE_DIMS else t for t in tensors]
        return super().run(block, given, statics)


NEO_TOKEN_BLOCKS: tuple[type[ForgeTokenBlocks], ...] = (
    NeoDouble,
    NeoSingle,
    LuminaBlock,
    QwenImageBlock,
    AnimaBlock,
)
