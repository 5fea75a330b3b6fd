"""Small random checkpoints of transformer models as diffusers folders, with text encoders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support import transformer_models as models
from tests.support.models import text_encoder, tokenizer
from tests.support.transformer_models import POOLED_WIDTH, TEXT_WIDTH

_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{{ message['content'][0]['text'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
)


def t5_tokenizer() -> Any:
    """T5's tokenizer with one token for each letter."""
    letters = "abcdefghijklmnopqrstuvwxyz,.▁"
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *((c, -2.0) for c in letters)]
    return transformers.T5TokenizerFast(vocab=vocab, extra_ids=0)


def t5(seed: int = 0) -> Any:
    """T5's encoder, tokens [B, N] -> states [B, N, TEXT_WIDTH]."""
    torch.manual_seed(seed + 7)
    config = transformers.T5Config(
        vocab_size=64, d_model=TEXT_WIDTH, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    return transformers.T5EncoderModel(config).eval()


def _letters() -> dict[str, int]:
    from tokenizers.pre_tokenizers import ByteLevel

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {token: i for i, token in enumerate([*special, *sorted(ByteLevel.alphabet())])}


def qwen_tokenizer() -> Any:
    """Qwen's tokenizer with one token for each byte."""
    made = transformers.Qwen2Tokenizer(
        vocab=_letters(), merges=[], pad_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    made.chat_template = _CHAT
    return made


def gemma_tokenizer() -> Any:
    """Gemma's tokenizer with one token for each letter."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    letters = "abcdefghijklmnopqrstuvwxyz,.▁<>"
    vocab = {token: i for i, token in enumerate([*special, *letters])}
    return transformers.GemmaTokenizer(vocab=vocab, merges=[], padding_side="right")


def _qwen_config() -> dict[str, Any]:
    return {
        "vocab_size": 300,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 12,
    }


def qwen3(seed: int = 0, layers: int = 2, width: int = TEXT_WIDTH) -> Any:
    """Qwen3, a text encoder of Z-Image and Flux.2-klein."""
    torch.manual_seed(seed + 7)
    config = {**_qwen_config(), "num_hidden_layers": layers, "hidden_size": width}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config)).eval()


def gemma2(seed: int = 0) -> Any:
    """Gemma 2, the text encoder of Lumina 2."""
    torch.manual_seed(seed + 7)
    return transformers.Gemma2Model(transformers.Gemma2Config(**_qwen_config())).eval()


def qwen_vl(seed: int = 0) -> Any:
    """Qwen2.5-VL, the text encoder of Qwen-Image."""
    torch.manual_seed(seed + 7)
    text = {key: value for key, value in _qwen_config().items() if key != "head_dim"}
    rope = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
        },
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


def _flux() -> Any:
    pipe = models.flux()
    pipe.register_modules(
        text_encoder=text_encoder(POOLED_WIDTH, 2),
        tokenizer=tokenizer(),
        text_encoder_2=t5(),
        tokenizer_2=t5_tokenizer(),
    )
    return pipe


def _sd3() -> Any:
    pipe = models.sd3()
    clips = [text_encoder(POOLED_WIDTH // 2, 2, seed=n, projection=True) for n in (1, 2)]
    pipe.register_modules(
        text_encoder=clips[0],
        tokenizer=tokenizer(),
        text_encoder_2=clips[1],
        tokenizer_2=tokenizer(),
        text_encoder_3=t5(),
        tokenizer_3=t5_tokenizer(),
    )
    return pipe


def _with_texts(
    make: Callable[[], Any], encoder: Callable[[], Any], words: Any, **others: Any
) -> Any:
    pipe = make()
    made = {name: each() for name, each in others.items()}
    pipe.register_modules(text_encoder=encoder(), tokenizer=words(), **made)
    return pipe


FOLDERS: dict[str, Callable[[], Any]] = {
    "sd3": _sd3,
    "flux": _flux,
    "chroma": lambda: _with_texts(models.chroma, t5, t5_tokenizer),
    "flux2-klein": lambda: _with_texts(
        models.flux2, lambda: qwen3(layers=28, width=TEXT_WIDTH // 3), qwen_tokenizer
    ),
    "qwen-image": lambda: _with_texts(
        models.qwen_image, qwen_vl, qwen_tokenizer, vae=models.qwen_vae
    ),
    "z-image": lambda: _with_texts(models.z_image, qwen3, qwen_tokenizer),
    "lumina2": lambda: _with_texts(models.lumina2, gemma2, gemma_tokenizer),
}
"""By label: makes the pipeline."""


def save_folder(label: str, folder: Path) -> Path:
    """Write a checkpoint as a diffusers folder."""
    FOLDERS[label]().save_pretrained(folder, safe_serialization=True)
    return folder
