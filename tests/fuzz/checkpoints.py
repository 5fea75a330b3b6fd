"""Targets: headers of safetensors files, LoRA files, model folders and .yaml files."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from onediff_ext.core.errors import CheckpointError
from tests.fuzz.pictures import file_of
from tests.fuzz.strategies import damaged, joined, near, safetensors
from tests.fuzz.target import Target


def _tensor(*shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]}


_UNET = "model.diffusion_model."
HEADERS: list[dict[str, Any]] = [
    {"__metadata__": {"format": "pt"}, "w": _tensor(0, 4)},
    {
        "__metadata__": {"onediff.ldm": json.dumps({"schema": 1, "head_count": 4})},
        f"{_UNET}input_blocks.0.0.weight": _tensor(0, 4, 3, 3),
        f"{_UNET}input_blocks.1.0.out_layers.3.weight": _tensor(0, 8, 3, 3),
        f"{_UNET}input_blocks.1.1.proj_in.weight": _tensor(0, 8),
        f"{_UNET}input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": _tensor(0, 8),
        f"{_UNET}middle_block.1.transformer_blocks.0.attn2.to_k.weight": _tensor(0, 8),
        f"{_UNET}out.2.weight": _tensor(0, 8, 3, 3),
        "first_stage_model.encoder.conv_in.weight": _tensor(0, 3, 3, 3),
        "first_stage_model.decoder.conv_in.weight": _tensor(0, 4, 3, 3),
        "first_stage_model.decoder.conv_out.weight": _tensor(0, 4, 3, 3),
    },
    {
        "__metadata__": {"ss_base_model_version": "sd_v1"},
        "lora_unet_attn2_to_k.lora_down.weight": _tensor(0, 8),
        "lora_te_text_model_self_attn_q_proj.lora_down.weight": _tensor(0, 8),
    },
]
_PIPE = SimpleNamespace(
    unet=SimpleNamespace(
        config=SimpleNamespace(cross_attention_dim=768, get=lambda name, default=None: default)
    ),
    text_encoder=SimpleNamespace(config=SimpleNamespace(hidden_size=768)),
)


def _header(content: bytes) -> None:
    from onediff_ext.hosts.diffusers.checkpoints.detect_architecture import detect_architecture
    from onediff_ext.hosts.diffusers.checkpoints.file_kinds import describe_keys
    from onediff_ext.hosts.diffusers.checkpoints.ldm_checkpoint import (
        unet_config,
    )
    from onediff_ext.hosts.diffusers.checkpoints.ldm_config_from_shapes import below
    from onediff_ext.hosts.diffusers.checkpoints.ldm_hints import read_hints
    from onediff_ext.hosts.diffusers.checkpoints.tensor_file import open_tensor_file
    from onediff_ext.hosts.diffusers.lora.lora_file import _check_fit

    path = file_of(content, "a.safetensors")
    with contextlib.suppress(CheckpointError):
        file = open_tensor_file(path)
        describe_keys(file.shapes)
        assert all(isinstance(text, str) for text in file.metadata.values())
        hints = read_hints(file)
        with contextlib.suppress(CheckpointError):
            _check_fit(_PIPE, file)
        architecture = detect_architecture(file)
        # `load_checkpoint` makes a CheckpointError of whatever impossible shapes raise.
        with contextlib.suppress(LookupError, ValueError, TypeError, StopIteration):
            unet_config(below(file.shapes, _UNET), architecture, hints, 0)


_HEADERS = st.one_of(
    near(HEADERS).map(safetensors),
    st.deferred(lambda: damaged([safetensors(header) for header in HEADERS])),
    joined(['{"w": ', '{"shape": [', "1", "]", "}", '"__metadata__": ', "[", ",", '"'], 8).map(
        safetensors
    ),
    st.binary(max_size=40),
)

YAML = """model:
  params:
    parameterization: v
    scale_factor: 0.18
    cond_stage_config: {params: {layer: last}}
    unet_config: {params: {num_heads: 8, num_head_channels: -1}}
"""


def _yaml(text: str) -> None:
    from onediff_ext.hosts.diffusers.checkpoints.ldm_hints import read_hints
    from onediff_ext.hosts.diffusers.checkpoints.tensor_file import TensorFile

    path = file_of(text.encode("utf-8", "surrogatepass"), "b.yaml")
    with contextlib.suppress(CheckpointError):
        hints = read_hints(TensorFile(path.with_suffix(".safetensors"), {}))
        assert hints.head_count is None or 0 < hints.head_count < 2**20


def _repeating(form: str, count: int) -> str:
    """A file whose last value is twice the one before it, and so on; it is printed to be read."""
    lines = ["x0: &a0 {k: v}\n"]
    lines += [f"x{n}: &a{n} {form.format(f'*a{n - 1}')}\n" for n in range(1, count + 1)]
    return f"{''.join(lines)}{YAML}    denoiser_config: {{params: *a{count}}}\n"


_YAMLS = st.one_of(
    st.deferred(lambda: damaged([YAML.encode()])).map(lambda raw: raw.decode("utf-8", "replace")),
    joined(
        ["a: ", "&a ", "*a", "\n", "[", "]", "{", "}", "- ", "!!python/object:os.system ", "  "], 12
    ),
    st.builds(
        _repeating, st.sampled_from(["[{0}, {0}]", "{{<<: [{0}, {0}]}}"]), st.integers(0, 25)
    ),
)

INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "scheduler": ["diffusers", "PNDMScheduler"],
    "image_encoder": [None, None],
}


def _index(value: Any) -> None:
    from onediff_ext.hosts.diffusers.checkpoints.model_folder import _read_index, _refuse_other_code

    with tempfile.TemporaryDirectory() as folder:
        text = value if isinstance(value, str) else json.dumps(value)
        (Path(folder) / "model_index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        with contextlib.suppress(CheckpointError):
            index = _read_index(Path(folder))
            _refuse_other_code(Path(folder), index)
            for name, entry in index.items():
                if not name.startswith("_") and isinstance(entry, list) and entry != [None, None]:
                    kept = "safety_checker" in index and name in (
                        "safety_checker",
                        "feature_extractor",
                    )
                    assert kept or entry[0] in ("diffusers", "transformers")


TARGETS = (
    Target("headers-of-tensors", _HEADERS, _header),
    Target("yaml", _YAMLS, _yaml),
    Target(
        "model-index", st.one_of(near([INDEX]), joined(["[", "{", '"a": ', "1", "]"], 6)), _index
    ),
)
