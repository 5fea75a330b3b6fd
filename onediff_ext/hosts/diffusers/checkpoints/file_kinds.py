"""Name the kind of a safetensors file from its keys, for error messages about other files."""

from __future__ import annotations

from collections.abc import Iterable

_FOLDER = (
    "Name the model's diffusers folder too, with --config FOLDER or config=: it has the text"
    " encoders and the VAE."
)

_KINDS = (
    # (a part of a key, what the file is, what to do)
    ("lora_", "a LoRA", "Choose a checkpoint first, then add the LoRA to it."),
    ("hada_w1", "a LyCORIS (LoHa)", "Choose a checkpoint first, then add the LoRA to it."),
    ("lokr_w1", "a LyCORIS (LoKr)", "Choose a checkpoint first, then add the LoRA to it."),
    ("control_model.", "a ControlNet", "Choose a checkpoint; ControlNets are added to it."),
    ("controlnet_cond_embedding.", "a ControlNet", "Choose a checkpoint; ControlNets come later."),
    ("input_hint_block.", "a ControlNet", "Choose a checkpoint; ControlNets are added to it."),
    ("motion_modules.", "a motion module", "Choose a checkpoint; motion modules are added to it."),
    ("emb_params", "a textual inversion", "Choose a checkpoint; embeddings are added to it."),
    ("joint_blocks.", "a Stable Diffusion 3 model", _FOLDER),
    ("double_blocks.", "a Flux model", _FOLDER),
    ("double_stream_blocks.", "a transformer model", _FOLDER),
    ("model.diffusion_model.", "a checkpoint", ""),
    ("down_blocks.0.resnets.0.time_emb_proj", "the UNet of a diffusers folder",
     "Choose the folder that holds model_index.json."),
    ("input_blocks.0.0.", "a UNet alone", "Use the full checkpoint, with text encoder and VAE."),
    ("decoder.conv_in.", "a VAE", "Choose a checkpoint; the VAE can be given beside it."),
    ("text_model.embeddings.", "a text encoder", "Use the full checkpoint."),
)  # fmt: skip


def describe_keys(keys: Iterable[str]) -> tuple[str, str]:
    """Name the kind of a file with these keys.

    Returns:
        (kind, what the user does next); the kind is "a checkpoint" for a checkpoint.
    """
    keys = tuple(keys)
    for part, what, hint in _KINDS:
        if any(part in key for key in keys):
            return what, hint
    return (
        "no Stable Diffusion model",
        "Choose an SD1, SD2 or SDXL checkpoint, or a diffusers folder.",
    )
