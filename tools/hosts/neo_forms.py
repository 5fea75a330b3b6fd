"""The forms of the slim checkpoints of Forge Neo alone, and what its code needs to load them.

Neo fixes most numbers of these models in its code: widths of transformers, and all of their text
encoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tools.hosts.forms import FLUX, TEXT_CONFIG, VAE_CONFIG, Replacement

# Checkpoints of transformers, by the beginnings of their names.
NEO_TRANSFORMERS = (
    "slim-flux",
    "slim-chroma",
    "slim-klein",
    "slim-z-image",
    "slim-lumina",
    "slim-qwen-image",
    "slim-anima",
)
# Checkpoints of transformers that edit pictures, and those whose weights they have.
EDITING = {"slim-kontext": "slim-flux", "slim-qwen-edit": "slim-qwen-image"}


@dataclass(frozen=True)
class TextForm:
    """The form of a text encoder that is a language model.

    Args:
        words: Size of its vocabulary.
        width: Channels of a token.
        inner: Channels within its MLP.
        layers: Number of layers.
        heads, shared_heads: Heads of queries, and of keys and values.
        head: Channels of a head.
    """

    words: int
    width: int
    inner: int
    layers: int
    heads: int
    shared_heads: int
    head: int = 128

    @property
    def config(self) -> dict[str, int]:
        """Those numbers that a host's config file has, under their names there."""
        return {
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.shared_heads,
        }

    def fields(self, name: str) -> str:
        """The beginning of Neo's class of that form.

        Args:
            name: The class.
        """
        numbers = {"vocab_size": self.words, **self.config}
        return f"class {name}:\n" + "".join(f"    {k}: int = {v}\n" for k, v in numbers.items())


@dataclass(frozen=True)
class BlockForm:
    """The form of a transformer with one kind of block.

    Args:
        width: Channels of a token.
        heads: Heads of queries.
        shared_heads: Heads of keys and values, of Lumina 2.
        blocks: Number of blocks.
    """

    width: int
    heads: int
    shared_heads: int = 0
    blocks: int = 2


# Qwen3 of Flux.2-klein and Z-Image. klein's prompts are the hidden states of three layers.
QWEN3 = TextForm(151936, 128, 256, 4, 2, 1)
KLEIN_OUTPUTS = 3
# Qwen3 of Anima. By the width, Neo tells it from the one above.
SMALL_QWEN3 = TextForm(151936, 64, 128, 2, 2, 1)
# Qwen2.5-VL of Qwen-Image. Its tower for pictures has its own form.
QWEN25 = TextForm(152064, 128, 256, 2, 2, 1)
QWEN25_VISION = TextForm(0, 128, 256, 2, 2, 2, head=64)
GEMMA2 = TextForm(256000, 128, 256, 3, 2, 1, head=256)

Z_IMAGE = BlockForm(256, 2, 2)
LUMINA = BlockForm(384, 4, 2)
QWEN_IMAGE = BlockForm(256, 2)
ANIMA = BlockForm(256, 2)
# Of Anima's adapter from its text encoder.
ADAPTER_LAYERS, ADAPTER_HEADS = 2, 2
# Channels of the first level of the VAE of Qwen-Image and Anima.
WAN_VAE_WIDTH = 16

_KLEIN, _MUGEN, _Z_IMAGE, _LUMINA, _QWEN, _ANIMA = (
    f"backend/huggingface/{name}"
    for name in (
        "black-forest-labs/FLUX.2-klein-4B",
        "CabalResearch/Mugen",
        "Tongyi-MAI/Z-Image-Turbo",
        "neta-art/Neta-Lumina",
        "Qwen/Qwen-Image",
        "circlestone-labs/Anima",
    )
)
_WAN_VAE = {"base_dim": WAN_VAE_WIDTH}
NEO_CONFIGS: Mapping[str, Mapping[str, object]] = {
    f"{_KLEIN}/text_encoder/config.json": QWEN3.config,
    f"{_KLEIN}/vae/config.json": VAE_CONFIG,
    f"{_MUGEN}/text_encoder/config.json": TEXT_CONFIG,
    f"{_MUGEN}/text_encoder_2/config.json": TEXT_CONFIG,
    f"{_MUGEN}/vae/config.json": VAE_CONFIG,
    f"{_Z_IMAGE}/text_encoder/config.json": QWEN3.config,
    f"{_Z_IMAGE}/vae/config.json": VAE_CONFIG,
    f"{_LUMINA}/text_encoder/config.json": {**GEMMA2.config, "head_dim": GEMMA2.head},
    f"{_LUMINA}/vae/config.json": VAE_CONFIG,
    f"{_QWEN}/text_encoder/config.json": QWEN25.config,
    f"{_QWEN}/vae/config.json": _WAN_VAE,
    f"{_ANIMA}/text_encoder/config.json": {"hidden_size": SMALL_QWEN3.width},
    f"{_ANIMA}/vae/config.json": _WAN_VAE,
}

# The text encoders in Neo: classes, the published forms and the slim ones.
_TEXT_FORMS = (
    ("Qwen3_4BConfig", TextForm(151936, 2560, 9728, 36, 32, 8), QWEN3),
    ("Qwen3_06BConfig", TextForm(151936, 1024, 3072, 28, 16, 8), SMALL_QWEN3),
    ("Qwen25_7BVLI_Config", TextForm(152064, 3584, 18944, 28, 28, 4), QWEN25),
    ("Gemma2_2B_Config", TextForm(256000, 2304, 9216, 26, 8, 4), GEMMA2),
)


_ADAPTER = (
    f"LLMAdapter(source_dim={SMALL_QWEN3.width}, target_dim={SMALL_QWEN3.width}, "
    f"model_dim={SMALL_QWEN3.width}, num_layers={ADAPTER_LAYERS}, num_heads={ADAPTER_HEADS})"
)
_LUMINA_CLASS = '"image_model": "lumina2",\n        "dim": '
_DETECTION = "modules_forge/packages/huggingface_guess/detection.py"
NEO_SOURCES: Mapping[str, tuple[Replacement, ...]] = {
    "modules_forge/packages/huggingface_guess/model_list.py": (
        (
            '"image_model": "flux2",\n        "hidden_size": 3072,',
            f'"image_model": "flux2",\n        "hidden_size": {FLUX.width},',
        ),
        *(
            (f"{_LUMINA_CLASS}{old},", f"{_LUMINA_CLASS}{new},")
            for old, new in ((2304, LUMINA.width), (3840, Z_IMAGE.width))
        ),
    ),
    _DETECTION: (
        ('["out_dim"] = 3072\n', f'["out_dim"] = {FLUX.width}\n'),
        ('["hidden_dim"] = 5120\n', f'["hidden_dim"] = {FLUX.guidance_width}\n'),
        ('["dim"] == 2304:', f'["dim"] == {LUMINA.width}:'),
        ('["dim"] == 3840:', f'["dim"] == {Z_IMAGE.width}:'),
        *(
            (
                f'["n_heads"] = {old}\n            dit_config["n_kv_heads"] = {old_shared}\n',
                f'["n_heads"] = {form.heads}\n'
                f'            dit_config["n_kv_heads"] = {form.shared_heads}\n',
            )
            for old, old_shared, form in ((24, 8, LUMINA), (30, 30, Z_IMAGE))
        ),
        ('["model_channels"] == 2048\n', f'["model_channels"] == {ANIMA.width}\n'),
        (
            '["crossattn_emb_channels"] = 1024\n',
            f'["crossattn_emb_channels"] = {SMALL_QWEN3.width}\n',
        ),
        (
            '["num_blocks"] = 28\n        dit_config["num_heads"] = 16\n',
            f'["num_blocks"] = {ANIMA.blocks}\n        dit_config["num_heads"] = {ANIMA.heads}\n',
        ),
    ),
    "backend/loader.py": (
        ('config["hidden_size"] == 2560:', f'config["hidden_size"] == {QWEN3.width}:'),
    ),
    "backend/nn/llm/llama.py": (
        *((old.fields(name), new.fields(name)) for name, old, new in _TEXT_FORMS),
        ("LLMAdapter()", _ADAPTER),
        (
            "Qwen2VLVisionTransformer(hidden_size=1280, ",
            f"Qwen2VLVisionTransformer(hidden_size={QWEN25_VISION.width}, "
            f"intermediate_size={QWEN25_VISION.inner}, num_heads={QWEN25_VISION.heads}, "
            f"num_layers={QWEN25_VISION.layers}, ",
        ),
    ),
    "backend/nn/qwen.py": (
        (
            "num_attention_heads: int = 24,\n        joint_attention_dim: int = 3584,",
            f"num_attention_heads: int = {QWEN_IMAGE.heads},\n"
            f"        joint_attention_dim: int = {QWEN25.width},",
        ),
    ),
    "backend/text_processing/klein_engine.py": (
        ("intermediate_output = [9, 18, 27]", "intermediate_output = [1, 2, 3]"),
    ),
}
