"""The blocks of diffusers' transformer models (DiT): SD3, Flux and their relatives.

A class whose ``forward`` has other arguments than those named here, as in another version of
diffusers, has no family, so it runs eager.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

from torch import nn

from onediff_ext.engine.blocks.argument_parts import JOINT, TWICE, Members
from onediff_ext.engine.blocks.family import CONTEXT, TOKENS, VECTOR, Arguments, Dims
from onediff_ext.engine.blocks.prompt_recipe import PromptRecipe
from onediff_ext.engine.blocks.token_stream_family import TokenStreamBlocks
from onediff_ext.engine.quantization import EightBitLinears
from onediff_ext.hosts.diffusers.attention_processors import (
    backend_eager_reason,
    dispatch_setting,
    foreign_backend_reason,
    processor_eager_reason,
    use_native_backend,
)
from onediff_ext.hosts.diffusers.block_base import DiffusersBlocks
from onediff_ext.hosts.diffusers.prompt_recipes import RECIPES

_VECTORS: Dims = ("batch", None, None)
# Tables for RoPE: of all tokens, of one stream's, or of each picture's.
_JOINT_TABLE: Dims = (JOINT, None)
_TABLE: Dims = ("tokens", None)
_TABLES: Dims = ("batch", "tokens", None)
_JOINT_MASK: Dims = ("batch", JOINT)
_MASK: Dims = ("batch", "tokens")

# Blocks whose attention and feed-forward network read the same tokens.
_ONE_INPUT = EightBitLinears(
    together=(("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),),
    exact=("norm.linear",),
)

_PROCESSORS = frozenset(
    f"diffusers.models.{name}"
    for name in (
        "attention_processor.FusedJointAttnProcessor2_0",
        "attention_processor.JointAttnProcessor2_0",
        "transformers.transformer_flux.FluxAttnProcessor",
        "transformers.transformer_flux2.Flux2AttnProcessor",
        "transformers.transformer_flux2.Flux2ParallelSelfAttnProcessor",
        "transformers.transformer_lumina2.Lumina2AttnProcessor2_0",
        "transformers.transformer_qwenimage.QwenDoubleStreamAttnProcessor2_0",
        "transformers.transformer_z_image.ZSingleStreamAttnProcessor",
    )
)


class _TokenFamily(TokenStreamBlocks, DiffusersBlocks):
    """Blocks on the image's tokens and the text's, which return both, the text first."""

    streams: Mapping[str, Dims] = {"hidden_states": TOKENS, "encoder_hidden_states": CONTEXT}
    outputs: tuple[str, ...] = ("encoder_hidden_states", "hidden_states")
    attentions: tuple[str, ...] = ("attn",)
    # Products of one vector for a picture stay exact: they cost nothing.
    eight_bits: EightBitLinears | None = EightBitLinears(
        together=(
            ("attn.to_q", "attn.to_k", "attn.to_v"),
            ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
            ("feed_forward.linear_1", "feed_forward.linear_3"),
        ),
        exact=("norm.linear", "norm1.linear", "norm1_context.linear", "img_mod.1", "txt_mod.1"),
    )

    def block_class(self) -> type[nn.Module] | None:
        found: Any = super().block_class()
        return found if found is not None and _arguments_of(found) == self.arguments else None

    def describe(self, block: Any) -> str:
        first = next(p for p in block.parameters() if p.ndim == 2)
        return f"{self.label} {first.shape[-1]}"

    def eager_reason(self, block: Any, arguments: Arguments) -> str | None:  # noqa: ARG002
        if getattr(block, "_chunk_size", None) is not None:
            return "feed-forward chunking is on"
        for name in self.attentions:
            layer = getattr(block, name)
            reason = processor_eager_reason(layer, _PROCESSORS) or backend_eager_reason(layer)
            if reason is not None:
                return reason
        return None

    def global_settings(self) -> Hashable:
        return dispatch_setting()

    def processor_reason(self, processor: object) -> str | None:
        return foreign_backend_reason(processor)

    def prompt_recipe(self, model: nn.Module) -> PromptRecipe | None:
        return RECIPES.get(type(model).__name__)

    def prepare(self, block: Any) -> None:
        use_native_backend(block)


class _OneStreamFamily(_TokenFamily):
    """Blocks on one stream, which they return."""

    streams: Mapping[str, Dims] = {"hidden_states": TOKENS}
    outputs = ("hidden_states",)


class JointFamily(_TokenFamily):
    """SD3's and SD3.5's block. The last one of a model returns no text."""

    label = "JointTransformerBlock"
    path = "diffusers.models.attention:JointTransformerBlock"
    arguments = ("hidden_states", "encoder_hidden_states", "temb", "joint_attention_kwargs")
    dims: Mapping[str, Dims | Members] = {"temb": VECTOR}
    attentions = ("attn", "attn2")

    def is_returned(self, block: Any, name: str) -> bool:
        return name == "hidden_states" or not block.context_pre_only


class SD3SingleFamily(_OneStreamFamily):
    """The block of SD3's ControlNets without text."""

    label = "SD3SingleTransformerBlock"
    path = "diffusers.models.transformers.transformer_sd3:SD3SingleTransformerBlock"
    arguments = ("hidden_states", "temb")
    dims: Mapping[str, Dims | Members] = {"temb": VECTOR}


class FluxFamily(_TokenFamily):
    """Flux.1's block with two streams."""

    label = "FluxTransformerBlock"
    path = "diffusers.models.transformers.transformer_flux:FluxTransformerBlock"
    arguments = (
        "hidden_states",
        "encoder_hidden_states",
        "temb",
        "image_rotary_emb",
        "joint_attention_kwargs",
    )
    dims: Mapping[str, Dims | Members] = {"temb": VECTOR, "image_rotary_emb": _JOINT_TABLE}


class FluxSingleFamily(FluxFamily):
    """Flux.1's block that joins both streams."""

    label = "FluxSingleTransformerBlock"
    path = "diffusers.models.transformers.transformer_flux:FluxSingleTransformerBlock"
    eight_bits = _ONE_INPUT


class ChromaFamily(_TokenFamily):
    """Chroma's block with two streams."""

    label = "ChromaTransformerBlock"
    path = "diffusers.models.transformers.transformer_chroma:ChromaTransformerBlock"
    arguments = (
        "hidden_states",
        "encoder_hidden_states",
        "temb",
        "image_rotary_emb",
        "attention_mask",
        "joint_attention_kwargs",
    )
    dims: Mapping[str, Dims | Members] = {
        "temb": _VECTORS,
        "image_rotary_emb": _JOINT_TABLE,
        "attention_mask": _JOINT_MASK,
    }


class ChromaSingleFamily(_OneStreamFamily):
    """Chroma's block on the tokens of text and image."""

    eight_bits = _ONE_INPUT
    label = "ChromaSingleTransformerBlock"
    path = "diffusers.models.transformers.transformer_chroma:ChromaSingleTransformerBlock"
    arguments = (
        "hidden_states",
        "temb",
        "image_rotary_emb",
        "attention_mask",
        "joint_attention_kwargs",
    )
    dims: Mapping[str, Dims | Members] = {
        "temb": _VECTORS,
        "image_rotary_emb": _TABLE,
        "attention_mask": _MASK,
    }


class Flux2Family(_TokenFamily):
    """Flux.2's block with two streams."""

    label = "Flux2TransformerBlock"
    path = "diffusers.models.transformers.transformer_flux2:Flux2TransformerBlock"
    arguments = (
        "hidden_states",
        "encoder_hidden_states",
        "temb_mod_img",
        "temb_mod_txt",
        "image_rotary_emb",
        "joint_attention_kwargs",
    )
    dims: Mapping[str, Dims | Members] = {
        "temb_mod_img": VECTOR,
        "temb_mod_txt": VECTOR,
        "image_rotary_emb": _JOINT_TABLE,
    }


class Flux2SingleFamily(_OneStreamFamily):
    """Flux.2's block on the tokens of text and image."""

    label = "Flux2SingleTransformerBlock"
    path = "diffusers.models.transformers.transformer_flux2:Flux2SingleTransformerBlock"
    arguments = (
        "hidden_states",
        "encoder_hidden_states",
        "temb_mod",
        "image_rotary_emb",
        "joint_attention_kwargs",
        "split_hidden_states",
        "text_seq_len",
    )
    dims: Mapping[str, Dims | Members] = {"temb_mod": VECTOR, "image_rotary_emb": _TABLE}


class QwenImageFamily(_TokenFamily):
    """Qwen-Image's block. Edit-2511's has a second timestep, for the tokens of its sources."""

    label = "QwenImageTransformerBlock"
    path = "diffusers.models.transformers.transformer_qwenimage:QwenImageTransformerBlock"
    arguments = (
        "hidden_states",
        "encoder_hidden_states",
        "encoder_hidden_states_mask",
        "temb",
        "image_rotary_emb",
        "joint_attention_kwargs",
        "modulate_index",
    )
    dims: Mapping[str, Dims | Members] = {
        "encoder_hidden_states_mask": ("batch", "context"),
        "temb": VECTOR,
        "image_rotary_emb": Members((_TABLE, ("context", None))),  # of image and text
        "modulate_index": _MASK,
    }

    def dims_of(self, block: Any) -> Mapping[str, Dims | Members]:
        return {**self.dims, "temb": (TWICE, None)} if block.zero_cond_t else self.dims


class ZImageFamily(_OneStreamFamily):
    """Z-Image's block: of the model, and of the refiners of image and text."""

    label = "ZImageTransformerBlock"
    path = "diffusers.models.transformers.transformer_z_image:ZImageTransformerBlock"
    arguments = (
        "x",
        "attn_mask",
        "freqs_cis",
        "adaln_input",
        "noise_mask",
        "adaln_noisy",
        "adaln_clean",
    )
    streams: Mapping[str, Dims] = {"x": TOKENS}
    outputs = ("x",)
    dims: Mapping[str, Dims | Members] = {
        "attn_mask": _MASK,
        "freqs_cis": _TABLES,
        "adaln_input": VECTOR,
    }
    attentions = ("attention",)
    eight_bits = EightBitLinears(
        together=(
            ("attention.to_q", "attention.to_k", "attention.to_v"),
            ("feed_forward.w1", "feed_forward.w3"),
        ),
        exact=("adaLN_modulation.0",),
    )
    redundant_attrs = DiffusersBlocks.redundant_attrs | {"layer_id"}


class Lumina2Family(_OneStreamFamily):
    """Lumina 2's block: of the model, and of the refiners of image and text."""

    label = "Lumina2TransformerBlock"
    path = "diffusers.models.transformers.transformer_lumina2:Lumina2TransformerBlock"
    arguments = ("hidden_states", "attention_mask", "image_rotary_emb", "temb")
    dims: Mapping[str, Dims | Members] = {
        "attention_mask": _MASK,
        "image_rotary_emb": _TABLES,
        "temb": VECTOR,
    }


TOKEN_FAMILIES = (
    JointFamily(),
    SD3SingleFamily(),
    FluxFamily(),
    FluxSingleFamily(),
    ChromaFamily(),
    ChromaSingleFamily(),
    Flux2Family(),
    Flux2SingleFamily(),
    QwenImageFamily(),
    ZImageFamily(),
    Lumina2Family(),
)


@cache
def _arguments_of(cls: Any) -> tuple[str, ...]:
    """Names of the arguments of a class's forward."""
    return tuple(inspect.signature(cls.forward).parameters)[1:]
