"""What diffusers' transformers do with a prompt alone: embed it, and in some models refine it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.prompt_recipe import Arguments, PromptRecipe


class Embedding(PromptRecipe):
    """One layer after another embeds the prompt.

    Args:
        names: Of the layers.
        without: As `PromptRecipe.without`: a LoRA's scale in these counts within the forward only.
    """

    prompt: tuple[str, ...] = ("encoder_hidden_states",)

    def __init__(self, *names: str, without: str = "joint_attention_kwargs") -> None:
        self._names, self.without = names, (without,)

    def layers(self, model: Any) -> Sequence[nn.Module]:
        return [attrgetter(name)(model) for name in self._names]

    def compute(self, model: Any, arguments: Arguments) -> Any:
        states = arguments[self.prompt[0]]
        for layer in self.layers(model):
            states = layer(states)
        return states


class Lumina2(Embedding):
    """Lumina 2 embeds the prompt, and refines it with blocks that take its mask."""

    prompt = ("encoder_hidden_states", "encoder_attention_mask")

    def __init__(self) -> None:
        super().__init__("time_caption_embed.caption_embedder", without="attention_kwargs")

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return list(model.context_refiner)

    def helpers(self, model: Any) -> Sequence[nn.Module]:
        return [model.time_caption_embed, model.rope_embedder]

    def parameters(self, model: Any) -> Sequence[torch.Tensor]:
        return list(model.rope_embedder.freqs_cis)

    def compute(self, model: Any, arguments: Arguments) -> Any:
        # states [B, N, D]; the table for the prompt's tokens depends on the mask alone
        states, mask = super().compute(model, arguments), arguments["encoder_attention_mask"]
        _, table, *_ = model.rope_embedder(arguments["hidden_states"], mask)
        for block in model.context_refiner:
            states = block(states, mask, table)
        return states


class ZImage(PromptRecipe):
    """Z-Image pads each prompt to a multiple of 32 tokens, embeds and refines it.

    What the forward takes in its place is padded already, so its own padding adds nothing.
    """

    prompt = ("cap_feats",)
    without = ("joint_attention_kwargs", "siglip_feats", "image_noise_mask")

    def layers(self, model: Any) -> Sequence[nn.Module]:
        return [model.cap_embedder]

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return list(model.context_refiner)

    def parameters(self, model: Any) -> Sequence[torch.Tensor]:
        tables = model.rope_embedder.freqs_cis  # None before the first forward
        return [model.cap_pad_token, *(tables or ())]

    def compute(self, model: Any, arguments: Arguments) -> Any:
        prompts = arguments["cap_feats"]  # one [N, C] for each picture
        if any(not isinstance(prompt, torch.Tensor) for prompt in prompts):
            return None  # several captions for a picture
        from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF

        device, found = arguments["x"][0].device, []
        for prompt in prompts:
            length = -(-len(prompt) // SEQ_MULTI_OF) * SEQ_MULTI_OF
            found.append(model._pad_with_ids(prompt, (length, 1, 1), (1, 0, 0), device)[:3])
        padded, ids, masks = map(list, zip(*found, strict=True))
        lengths = [len(each) for each in padded]
        states = list(model.cap_embedder(torch.cat(padded)).split(lengths))
        states, table, mask, *_ = model._prepare_sequence(
            states, ids, masks, model.cap_pad_token, None, device
        )
        for block in model.context_refiner:
            states = block(states, mask, table)  # [B, N, D]
        return [state[:length] for state, length in zip(states, lengths, strict=True)]


RECIPES: dict[str, PromptRecipe] = {
    "SD3Transformer2DModel": Embedding("context_embedder"),
    "FluxTransformer2DModel": Embedding("context_embedder"),
    "ChromaTransformer2DModel": Embedding("context_embedder"),
    "Flux2Transformer2DModel": Embedding("context_embedder"),
    "QwenImageTransformer2DModel": Embedding("txt_norm", "txt_in", without="attention_kwargs"),
    "ZImageTransformer2DModel": ZImage(),
    "Lumina2Transformer2DModel": Lumina2(),
}
"""By the name of the model's class."""
