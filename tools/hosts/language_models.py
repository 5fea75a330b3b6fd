"""Shapes of the text encoders that are language models: Qwen2.5, Qwen3 and Gemma 2."""

from __future__ import annotations

import torch

from tools.hosts.flux_models import Shapes, linear, prefixed
from tools.hosts.neo_forms import TextForm


def qwen3(size: str, form: TextForm, seed: int) -> dict[str, torch.Tensor]:
    """Qwen3 with random weights, as a part of a checkpoint.

    Args:
        size: The published model's, as Neo spells it, such as ``"4b"``.
        form: Its numbers.
        seed: Of the weights.
    """
    prefix = f"text_encoders.qwen3_{size}.transformer.model"
    return prefixed(prefix, language_model(form, head_norms=True), seed)


def language_model(
    form: TextForm, *, head_norms: bool = False, biases: bool = False, mlp_norms: bool = False
) -> Shapes:
    """Names and shapes of a language model's weights, without its head.

    Args:
        form: Its numbers.
        head_norms: Whether queries and keys are normed, as in Qwen3.
        biases: Whether queries, keys and values have biases, as in Qwen2.5.
        mlp_norms: Whether norms stand around the MLP, as in Gemma 2.
    """
    norms = ["input_layernorm", "post_attention_layernorm"]
    if mlp_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    projections = {
        "q_proj": form.heads * form.head,
        "k_proj": form.shared_heads * form.head,
        "v_proj": form.shared_heads * form.head,
    }
    yield "embed_tokens.weight", (form.words, form.width)
    yield "norm.weight", (form.width,)
    for number in range(form.layers):
        prefix = f"layers.{number}"
        for name, outputs in projections.items():
            weight, bias = linear(f"{prefix}.self_attn.{name}", outputs, form.width)
            yield weight
            if biases:
                yield bias
        yield f"{prefix}.self_attn.o_proj.weight", (form.width, form.heads * form.head)
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}.mlp.{name}.weight", (form.inner, form.width)
        yield f"{prefix}.mlp.down_proj.weight", (form.width, form.inner)
        if head_norms:
            for name in ("q_norm", "k_norm"):
                yield f"{prefix}.self_attn.{name}.weight", (form.head,)
        for name in norms:
            yield f"{prefix}.{name}.weight", (form.width,)
