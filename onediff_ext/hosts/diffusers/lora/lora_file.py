"""Parse LoRA files and load them into a diffusers pipeline, with diffusers' own conversion."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

from onediff_ext.core.errors import CheckpointError, OptionError
from onediff_ext.core.typed_paths import given_path
from onediff_ext.core.words import first_line, typed
from onediff_ext.hosts.diffusers.checkpoints.detect_architecture import architecture_of_unet
from onediff_ext.hosts.diffusers.checkpoints.file_kinds import describe_keys
from onediff_ext.hosts.diffusers.checkpoints.tensor_file import TensorFile, open_tensor_file
from onediff_ext.hosts.diffusers.denoiser import denoiser_of

logger = logging.getLogger(__name__)

_COMPONENTS = ("unet", "transformer", "text_encoder", "text_encoder_2")


def load_lora(
    pipe: Any, path: str | Path, weight: float = 1.0, adapter_name: str | None = None
) -> str:
    """Load a LoRA and activate it in addition to the LoRAs already active.

    Args:
        pipe: A diffusers pipeline with a UNet or a transformer.
        path: A .safetensors file with diffusers', PEFT's or kohya's names.
        weight: Strength; 1.0 is as trained.
        adapter_name: Its name in diffusers; None derives it from the file's name.

    Returns:
        The adapter's name, for `pipe.set_adapters` and `pipe.delete_adapters`.

    Raises:
        OptionError: An argument has a wrong type.
        CheckpointError: The file is not a LoRA, or is for another architecture.
    """
    path = given_path(path, "path")
    if not isinstance(weight, int | float) or not math.isfinite(weight):
        raise OptionError(f"{weight!r} is no LoRA weight.", "Pass a number such as 0.8.")
    if not hasattr(pipe, "load_lora_weights"):
        raise OptionError(f"{typed(pipe)} takes no LoRA.", "Pass a pipeline of diffusers.")
    file = open_tensor_file(path)
    what, _ = describe_keys(file.shapes)
    if what != "a LoRA":
        raise CheckpointError(f"{path} is {what}, not a LoRA.", "Choose a LoRA .safetensors file.")
    if getattr(pipe, "unet", None) is not None:
        _check_fit(pipe, file)  # diffusers compares the layers of transformers itself
    weights = file.read(file.shapes, denoiser_of(pipe).dtype)
    present = {name for names in pipe.get_list_adapters().values() for name in names}
    name = adapter_name or _free_name(path.stem, present)
    active = {
        active_name: _strength(pipe, active_name) for active_name in pipe.get_active_adapters()
    }
    try:
        pipe.load_lora_weights(weights, adapter_name=name)
    except MemoryError:
        raise
    except Exception as exc:  # diffusers and peft raise any type here
        present_now = {one for names in pipe.get_list_adapters().values() for one in names}
        if name in present_now - present:
            pipe.delete_adapters(name)
        raise CheckpointError(
            f"{path} cannot be loaded: {_reason(exc)}",
            "Choose a LoRA for this kind of checkpoint, in a layout that diffusers knows.",
        ) from exc
    pipe.set_adapters([*active, name], [*active.values(), weight])
    logger.info("Loaded LoRA %s at %s", name, weight)
    return name


def _strength(pipe: Any, name: str) -> float:
    """Return the strength at which an adapter runs."""
    for component in _COMPONENTS:
        model = getattr(pipe, component, None)
        for module in model.modules() if model is not None else ():
            if name in getattr(module, "scaling", {}):
                base = module.lora_alpha[name] / module.r[name]
                return float(module.scaling[name] / base) if base else 1.0
    return 1.0


def _free_name(stem: str, taken: set[str]) -> str:
    from torch.nn import ModuleDict

    # Adapter names become attribute names: no dots, and no existing attribute of a module.
    base = re.sub(r"\W+", "_", stem) or "lora"
    if hasattr(ModuleDict(), base):
        base += "_lora"
    name, number = base, 2
    while name in taken:
        name, number = f"{base}_{number}", number + 1
    return name


def _check_fit(pipe: Any, file: TensorFile) -> None:
    """Refuse a LoRA whose context width or text encoders belong to another architecture.

    Raises:
        CheckpointError: The LoRA does not fit.
    """
    label = architecture_of_unet(pipe.unet.config, getattr(pipe, "text_encoder", None) is not None)
    context_width = pipe.unet.config.cross_attention_dim
    second = getattr(pipe, "text_encoder_2", None)
    text_widths = [
        model.config.hidden_size
        for model in (getattr(pipe, "text_encoder", None), second)
        if model is not None
    ]
    trained_on = file.metadata.get("ss_base_model_version") or file.metadata.get(
        "modelspec.architecture"
    )
    about = f" (its metadata says {trained_on})" if trained_on else ""
    for key, shape in file.shapes.items():
        if not key.endswith((".lora_down.weight", ".lora_A.weight", ".lora.down.weight")):
            continue
        if len(shape) < 2:
            raise CheckpointError(
                f"{file.path} is damaged: {key} has the shape {shape}.", "Use another copy."
            )
        if re.search(r"attn2[._]to_[kv]", key) and "text" not in key[:9]:
            if shape[1] != context_width:
                raise CheckpointError(
                    f"{file.path} is a LoRA for a text context {shape[1]} wide{about}; this"
                    f" checkpoint ({label}) has {context_width}.",
                    "Choose a LoRA made for this kind of checkpoint.",
                )
        elif re.match(r"(lora_te|text_encoder)", key) and re.search(r"self_attn[._]q_proj", key):
            is_second = key.startswith(("lora_te2_", "text_encoder_2."))
            if (is_second and second is None) or shape[1] not in text_widths:
                raise CheckpointError(
                    f"{file.path} is a LoRA for another text encoder, {shape[1]} wide{about}; this"
                    f" checkpoint ({label}) has {', '.join(map(str, text_widths))}.",
                    "Choose a LoRA made for this kind of checkpoint.",
                )


def _reason(exc: Exception) -> str:
    # torch's first line only says that there were errors; the next ones name layers.
    lines = [line.strip() for line in str(exc).strip().splitlines()]
    if len(lines) > 1 and lines[0].startswith("Error(s) in loading"):
        return f"{len(lines) - 1} of its layers do not fit, such as: {lines[1]}"
    return first_line(str(exc), type(exc).__name__)
