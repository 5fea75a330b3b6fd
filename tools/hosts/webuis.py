"""The WebUIs of the live tests: which versions were run, and how each starts on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tools.hosts.forms import (
    CHROMA,
    FLUX,
    FLUX_DEV,
    SD3,
    SD3_T5_CONFIG,
    SD35_MEDIUM,
    T5_CONFIG,
    TEXT_CONFIG,
    VAE_CONFIG,
    VAE_WIDTHS,
    Replacement,
)
from tools.hosts.neo_forms import EDITING, NEO_CONFIGS, NEO_SOURCES, NEO_TRANSFORMERS

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
# Forge's tokenizer of SD3 needs it; later ones need a newer protobuf than Forge's.
SENTENCEPIECE = "sentencepiece==0.2.0"
_SD1, _INPAINTING, _SDXL = (
    f"backend/huggingface/{name}"
    for name in (
        "runwayml/stable-diffusion-v1-5",
        "runwayml/stable-diffusion-inpainting",
        "stabilityai/stable-diffusion-xl-base-1.0",
    )
)
_FORGE_CONFIGS: Mapping[str, Mapping[str, object]] = {
    f"{_SD1}/text_encoder/config.json": TEXT_CONFIG,
    f"{_SD1}/vae/config.json": VAE_CONFIG,
    f"{_INPAINTING}/text_encoder/config.json": TEXT_CONFIG,
    f"{_INPAINTING}/vae/config.json": VAE_CONFIG,
    f"{_SDXL}/text_encoder/config.json": TEXT_CONFIG,
    f"{_SDXL}/text_encoder_2/config.json": TEXT_CONFIG,
    f"{_SDXL}/vae/config.json": VAE_CONFIG,
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
    "ldm_patched/modules/sd1_clip_config.json": TEXT_CONFIG,
    "ldm_patched/modules/clip_config_bigg.json": TEXT_CONFIG,
}
_SLIM_CHECKPOINTS = {
    "ONEDIFF_WEBUI_CHECKPOINTS": "slim-a.,slim-b.",
    "ONEDIFF_WEBUI_OTHER": "slim-xl",
    "ONEDIFF_WEBUI_INPAINTING": "slim-inpainting",
}
_TRANSFORMERS = {
    "ONEDIFF_WEBUI_TRANSFORMERS": "slim-flux,slim-chroma,slim-sd35-medium,slim-sd35-large"
}
# The point tells the first one from "onediff-demo-other" here, and from "slim-anima" above.
_DEMO_CHECKPOINTS = {
    "ONEDIFF_WEBUI_CHECKPOINTS": "onediff-demo.,onediff-demo-other",
    "ONEDIFF_WEBUI_OTHER": "tiny-xl",
}
_PREPARING = ("--skip-torch-cuda-test", "--skip-install", "--exit")
_FORGE_FLAGS = ("--always-cpu", "--all-in-fp32", "--skip-torch-cuda-test", "--skip-install")


_FLUX_CONFIGS: Mapping[str, Mapping[str, object]] = {
    f"{FLUX_DEV}/text_encoder/config.json": TEXT_CONFIG,
    f"{FLUX_DEV}/text_encoder_2/config.json": T5_CONFIG,
    f"{FLUX_DEV}/vae/config.json": VAE_CONFIG,
    f"{CHROMA}/text_encoder/config.json": T5_CONFIG,
    f"{CHROMA}/vae/config.json": VAE_CONFIG,
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
_SD3_CONFIGS: Mapping[str, Mapping[str, object]] = {
    f"{SD3}/text_encoder/config.json": TEXT_CONFIG,
    f"{SD3}/text_encoder_2/config.json": TEXT_CONFIG,
    f"{SD3}/text_encoder_3/config.json": SD3_T5_CONFIG,
    f"{SD3}/vae/config.json": VAE_CONFIG,
}
# Of SD3.5-medium's 24 blocks, 13 have a second attention.
_SD3_SOURCES: Mapping[str, tuple[Replacement, ...]] = {
    "backend/nn/mmditx.py": ((f"= {list(range(13))} if", f"= {list(range(SD35_MEDIUM.dual))} if"),),
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
        packages=(CLIP, OPENCV, JOBLIB, SENTENCEPIECE),
        flags=_FORGE_FLAGS,
        preparing_flags=_PREPARING,
        checkpoints={**_SLIM_CHECKPOINTS, **_TRANSFORMERS},
        slim_configs={**_FORGE_CONFIGS, **_FLUX_CONFIGS, **_SD3_CONFIGS},
        slim_sources={**_FLUX_SOURCES, **_SD3_SOURCES},
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
            "ONEDIFF_WEBUI_TRANSFORMERS": ",".join(NEO_TRANSFORMERS),
            "ONEDIFF_WEBUI_EDITING": ",".join(EDITING),
        },
        slim_configs={**_FORGE_CONFIGS, **_FLUX_CONFIGS, **NEO_CONFIGS},
        slim_sources=NEO_SOURCES,
        # Forge has this file, and the two are one.
        copies={f"{CHROMA}/tokenizer/tokenizer.json": f"{FLUX_DEV}/tokenizer_2/tokenizer.json"},
    ),
}
