"""The WebUIs of the live tests: which versions were run, and how each starts on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# A text in a Python file, and what takes its place.
Replacement = tuple[str, str]

# PyTorch of all test hosts; torchvision is the release that fits it.
TORCH = ("torch==2.13.0", "torchvision==0.28.0")
# Installed last: PyTorch asks for a newer one to compile with, the WebUIs for its pkg_resources.
SETUPTOOLS = "setuptools==69.5.1"
# OpenAI's CLIP, which three hosts fetch as an archive, under its name on PyPI.
CLIP = "clip-anytorch==2.6.0"
# The built-in ControlNet of Forge and its descendants reads pictures with it.
OPENCV = "opencv-python-headless==4.10.0.84"
# Their built-in "soft inpainting" imports it; only Neo's list names it.
JOBLIB = "joblib==1.5.3"
# The slim checkpoints' text encoders, of which reForge reads the third last hidden states.
TEXT_LAYERS = 3
# Their VAE: a quarter of the usual width, but for the first level. Its norms have 32 groups, and a
# group of one channel leaves nothing but rounding of a picture of one colour.
VAE_WIDTHS = (64, 64, 128, 128)

_TEXT = {"num_hidden_layers": TEXT_LAYERS}
_VAE = {"block_out_channels": list(VAE_WIDTHS)}
_SD1, _INPAINTING, _SDXL = (
    f"backend/huggingface/{name}"
    for name in (
        "runwayml/stable-diffusion-v1-5",
        "runwayml/stable-diffusion-inpainting",
        "stabilityai/stable-diffusion-xl-base-1.0",
    )
)
_FORGE_CONFIGS: Mapping[str, Mapping[str, object]] = {
    f"{_SD1}/text_encoder/config.json": _TEXT,
    f"{_SD1}/vae/config.json": _VAE,
    f"{_INPAINTING}/text_encoder/config.json": _TEXT,
    f"{_INPAINTING}/vae/config.json": _VAE,
    f"{_SDXL}/text_encoder/config.json": _TEXT,
    f"{_SDXL}/text_encoder_2/config.json": _TEXT,
    f"{_SDXL}/vae/config.json": _VAE,
}
# reForge's VAE of SD1.5 and SDXL, in its code.
_REFORGE_SOURCES: Mapping[str, tuple[Replacement, ...]] = {
    "ldm_patched/modules/sd.py": (
        (
            "'ch': 128, 'ch_mult': [1, 2, 4, 4],",
            f"'ch': {VAE_WIDTHS[0]}, 'ch_mult': {[w // VAE_WIDTHS[0] for w in VAE_WIDTHS]},",
        ),
    )
}
_REFORGE_CONFIGS: Mapping[str, Mapping[str, object]] = {
    "ldm_patched/modules/sd1_clip_config.json": _TEXT,
    "ldm_patched/modules/clip_config_bigg.json": _TEXT,
}
_SLIM_CHECKPOINTS = {
    "ONEDIFF_WEBUI_CHECKPOINTS": "slim-a,slim-b",
    "ONEDIFF_WEBUI_OTHER": "slim-xl",
    "ONEDIFF_WEBUI_INPAINTING": "slim-inpainting",
}
_TRANSFORMERS = {"ONEDIFF_WEBUI_TRANSFORMERS": "slim-flux,slim-chroma"}
# The point tells the first one from "onediff-demo-other".
_DEMO_CHECKPOINTS = {
    "ONEDIFF_WEBUI_CHECKPOINTS": "onediff-demo.,onediff-demo-other",
    "ONEDIFF_WEBUI_OTHER": "tiny-xl",
}
_PREPARING = ("--skip-torch-cuda-test", "--skip-install", "--exit")
_FORGE_FLAGS = ("--always-cpu", "--all-in-fp32", "--skip-torch-cuda-test", "--skip-install")


@dataclass(frozen=True)
class FluxForm:
    """The form of checkpoints of Flux.1-dev and Chroma; by default of the slim ones.

    Args:
        width: Channels of a token; a head has 128.
        context: Channels of the text encoder T5.
        double, single: Blocks of each kind.
        guidance_width: Channels of Chroma's network for modulations.
        t5_layers, t5_heads, t5_mlp: Of T5, with the channels within its MLP.
        clip_layers: Of the other text encoder.
        vae_widths: Channels of the VAE's levels.
    """

    width: int = 256
    context: int = 128
    double: int = 2
    single: int = 2
    guidance_width: int = 64
    t5_layers: int = 2
    t5_heads: int = 4
    t5_mlp: int = 256
    clip_layers: int = TEXT_LAYERS
    vae_widths: tuple[int, ...] = VAE_WIDTHS

    @property
    def t5(self) -> dict[str, object]:
        """The config of the text encoder, as transformers has it."""
        return {
            "d_ff": self.t5_mlp,
            "d_kv": self.context // self.t5_heads,
            "d_model": self.context,
            "num_heads": self.t5_heads,
            "num_layers": self.t5_layers,
            "num_decoder_layers": self.t5_layers,
            "dense_act_fn": "gelu_new",
            "feed_forward_proj": "gated-gelu",
        }


FLUX = FluxForm()
_T5 = {name: v for name, v in FLUX.t5.items() if name.startswith(("d_", "num_"))} | {
    "dense_act_fn": "gelu_pytorch_tanh"
}
_FLUX_DEV, _CHROMA = (
    f"backend/huggingface/{name}" for name in ("black-forest-labs/FLUX.1-dev", "Chroma")
)
_FLUX_CONFIGS: Mapping[str, Mapping[str, object]] = {
    f"{_FLUX_DEV}/text_encoder/config.json": _TEXT,
    f"{_FLUX_DEV}/text_encoder_2/config.json": _T5,
    f"{_FLUX_DEV}/vae/config.json": _VAE,
    f"{_CHROMA}/text_encoder/config.json": _T5,
    f"{_CHROMA}/vae/config.json": _VAE,
}
# Forge knows one size of Flux only.
_FLUX_SOURCES: Mapping[str, tuple[Replacement, ...]] = {
    "repositories/huggingface_guess/huggingface_guess/detection.py": tuple(
        (f'["{name}"] = {old}\n', f'["{name}"] = {new}\n')
        for name, old, new in (
            ("context_in_dim", 4096, FLUX.context),
            ("hidden_size", 3072, FLUX.width),
            ("num_heads", 24, FLUX.width // 128),
            ("depth", 19, FLUX.double),
            ("depth_single_blocks", 38, FLUX.single),
        )
    ),
    "backend/loader.py": (
        ("'guidance_hidden_dim': 5120", f"'guidance_hidden_dim': {FLUX.guidance_width}"),
    ),
}
# The text encoder of the slim Flux.2-klein. Its prompts are the hidden states of three layers.
QWEN = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
QWEN_WORDS, QWEN_HEAD, QWEN_OUTPUTS = 151936, 128, 3
_KLEIN, _MUGEN = (
    f"backend/huggingface/{name}"
    for name in ("black-forest-labs/FLUX.2-klein-4B", "CabalResearch/Mugen")
)
_NEO_CONFIGS: Mapping[str, Mapping[str, object]] = {
    f"{_KLEIN}/text_encoder/config.json": QWEN,
    f"{_KLEIN}/vae/config.json": _VAE,
    f"{_MUGEN}/text_encoder/config.json": _TEXT,
    f"{_MUGEN}/text_encoder_2/config.json": _TEXT,
    f"{_MUGEN}/vae/config.json": _VAE,
}
# Neo knows one size of Chroma, two of klein and of its text encoder.
_QWEN_4B = (2560, 9728, 36, 32, 8)


def _qwen_fields(values: Iterable[int]) -> str:
    fields = "".join(f"    {k}: int = {v}\n" for k, v in zip(QWEN, values, strict=True))
    return f"class Qwen3_4BConfig:\n    vocab_size: int = {QWEN_WORDS}\n{fields}"


_NEO_SOURCES: Mapping[str, tuple[Replacement, ...]] = {
    "modules_forge/packages/huggingface_guess/model_list.py": (
        (
            '"image_model": "flux2",\n        "hidden_size": 3072,',
            f'"image_model": "flux2",\n        "hidden_size": {FLUX.width},',
        ),
    ),
    "modules_forge/packages/huggingface_guess/detection.py": (
        ('["out_dim"] = 3072\n', f'["out_dim"] = {FLUX.width}\n'),
        ('["hidden_dim"] = 5120\n', f'["hidden_dim"] = {FLUX.guidance_width}\n'),
    ),
    "backend/loader.py": (
        (
            f'config["hidden_size"] == {_QWEN_4B[0]}:',
            f'config["hidden_size"] == {QWEN["hidden_size"]}:',
        ),
    ),
    "backend/nn/llm/llama.py": ((_qwen_fields(_QWEN_4B), _qwen_fields(QWEN.values())),),
    "backend/text_processing/klein_engine.py": (
        ("intermediate_output = [9, 18, 27]", "intermediate_output = [1, 2, 3]"),
    ),
}


@dataclass(frozen=True)
class WebUI:
    """One WebUI as a test host.

    Args:
        title: Its name in documents.
        commit: The commit that was run; empty where the checkout that was run has no history.
        port: Of its page and API on this machine; each host has its own.
        requirements: Its own list of packages, a path in its checkout.
        packages: Further packages that it imports, which its launcher would fetch from elsewhere.
        flags: Command line for fp32 on a CPU.
        preparing_flags: Command line that makes its launcher fetch the repositories it imports,
            and end; empty if it imports none.
        loads_demo: Whether it loads the demo checkpoint; the others get slim random checkpoints.
        checkpoints: What the live tests need to know of its checkpoints, as environment variables.
        slim_configs: Its JSON files, by path, and the values that fit the slim checkpoints.
        slim_sources: The same in its Python files: texts that stand there, and the new ones. Those
            in ``repositories`` are there once its launcher has fetched them.
        copies: Files that its checkout lacks, by path, and which of its files each is equal to.
    """

    title: str
    commit: str
    port: int
    requirements: str
    packages: tuple[str, ...]
    flags: tuple[str, ...]
    preparing_flags: tuple[str, ...] = ()
    loads_demo: bool = False
    checkpoints: Mapping[str, str] = field(default_factory=lambda: _SLIM_CHECKPOINTS)
    slim_configs: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    slim_sources: Mapping[str, tuple[Replacement, ...]] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)


WEBUIS: Mapping[str, WebUI] = {
    "a1111": WebUI(
        title="AUTOMATIC1111 v1.10.1",
        commit="82a973c04367123ae98bd9abdf80d9eda9b910e2",
        port=7860,
        requirements="requirements_versions.txt",
        packages=(CLIP,),
        flags=("--use-cpu", "all", "--no-half", "--skip-torch-cuda-test", "--skip-install"),
        preparing_flags=_PREPARING,
        loads_demo=True,
        checkpoints=_DEMO_CHECKPOINTS,
    ),
    "forge": WebUI(
        title="Forge",
        commit="dfdcbab685e57677014f05a3309b48cc87383167",
        port=7861,
        requirements="requirements_versions.txt",
        packages=(CLIP, OPENCV, JOBLIB),
        flags=_FORGE_FLAGS,
        preparing_flags=_PREPARING,
        checkpoints={**_SLIM_CHECKPOINTS, **_TRANSFORMERS},
        slim_configs={**_FORGE_CONFIGS, **_FLUX_CONFIGS},
        slim_sources=_FLUX_SOURCES,
    ),
    "reforge": WebUI(
        title="reForge",
        commit="3b56b268ad9158ee8b30900973b6ccda4ec22241",
        port=7862,
        requirements="requirements_versions.txt",
        packages=(CLIP, OPENCV, JOBLIB),
        flags=_FORGE_FLAGS,
        preparing_flags=_PREPARING,
        # Its SDXL reads the 12th hidden state of a text encoder, which the slim one lacks.
        checkpoints={k: v for k, v in _SLIM_CHECKPOINTS.items() if k != "ONEDIFF_WEBUI_OTHER"},
        slim_configs=_REFORGE_CONFIGS,
        slim_sources=_REFORGE_SOURCES,
    ),
    "neo": WebUI(
        title="Forge Neo 2.26",
        commit="",
        port=7863,
        requirements="requirements.txt",
        packages=("gradio==4.40.0", "gradio_rangeslider==0.0.8"),
        flags=("--cpu", "--force-fp32", "--skip-prepare-environment"),
        checkpoints={
            **_SLIM_CHECKPOINTS,
            "ONEDIFF_WEBUI_OTHER": "slim-xl,slim-mugen",
            "ONEDIFF_WEBUI_TRANSFORMERS": "slim-flux,slim-chroma,slim-klein",
        },
        slim_configs={**_FORGE_CONFIGS, **_FLUX_CONFIGS, **_NEO_CONFIGS},
        slim_sources=_NEO_SOURCES,
        # Forge has this file, and the two are one.
        copies={f"{_CHROMA}/tokenizer/tokenizer.json": f"{_FLUX_DEV}/tokenizer_2/tokenizer.json"},
    ),
}
