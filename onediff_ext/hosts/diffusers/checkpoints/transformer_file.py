"""Load a single file with the weights of a transformer; all else is a diffusers folder's.

diffusers' ``from_single_file`` knows the files of Flux, SD3 and others. It gets tensors that were
read from safetensors here, and the folder's configuration, so it downloads and unpickles nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.core.errors import CheckpointError, OneDiffError
from onediff_ext.core.words import first_line
from onediff_ext.engine.out_of_memory import is_out_of_memory
from onediff_ext.hosts.diffusers.checkpoints.model_folder import checked_index, load_folder
from onediff_ext.hosts.diffusers.checkpoints.tensor_file import TensorFile, open_tensor_file

if TYPE_CHECKING:
    from onediff_ext.hosts.diffusers.checkpoints.ldm_checkpoint import Placement

_PREFIX = "model.diffusion_model."
_UNET_KEY = "input_blocks.0.0.weight"
# Ends of the keys beside weights in 8 or 4 bits, which mean nothing without them.
_QUANTIZED = (
    "scale_weight", "weight_scale", "scale_input", "input_scale", "scaled_fp8", "comfy_quant",
    ".absmax", ".quant_map", ".weight_scale_2",
)  # fmt: skip
_SAME_MODEL = (
    "Use the diffusers folder of this very model, such as that of FLUX.1-dev for its files."
)


def load_transformer_file(path: Path, folder: Path, place: Placement) -> Any:
    """Load a pipeline: its transformer from a file, and all other models from a folder.

    Args:
        path: A .safetensors file, in the layout of the model's authors or of diffusers. Text
            encoders and a VAE in it are not read.
        folder: A diffusers folder of the same model. It needs no weights of the transformer.
        place: dtype and device.

    Raises:
        CheckpointError: The file is no transformer of the folder's model, or is quantized.
    """
    import diffusers

    file = open_tensor_file(path)
    index = checked_index(folder)
    _, class_name = index.get("transformer") or (None, None)
    if class_name is None:
        raise CheckpointError(f"{folder} has no transformer.", _SAME_MODEL)
    keys = _keys(file)
    dtype = place.dtype or file.dtype()
    try:
        model = getattr(diffusers, class_name).from_single_file(
            file.read(keys), config=str(folder), subfolder="transformer",
            local_files_only=True, torch_dtype=dtype,
        )  # fmt: skip
    except (OneDiffError, MemoryError):
        raise
    except Exception as exc:  # diffusers raises any type here
        if is_out_of_memory(exc):
            raise
        reason = first_line(str(exc), type(exc).__name__)
        if "meta tensor" in reason:  # torch's words for a weight that nothing was read into
            reason = "the file lacks weights."
        raise CheckpointError(
            f"{path} cannot be loaded as the {class_name} of {folder}: {reason}", _SAME_MODEL
        ) from exc
    _check(model, file, keys, folder)
    return load_folder(folder, replace(place, dtype=dtype), transformer=model)


def _keys(file: TensorFile) -> list[str]:
    """Return the keys of the transformer's weights.

    Raises:
        CheckpointError: The file has a UNet, or weights in another format.
    """
    if any(key.removeprefix(_PREFIX) == _UNET_KEY for key in file.shapes):
        raise CheckpointError(
            f"{file.path} is a checkpoint with a UNet.", "Load it without a config folder."
        )
    quantized = [key for key in file.shapes if key.endswith(_QUANTIZED)]
    if quantized:
        raise CheckpointError(
            f"{file.path} holds quantized weights ({quantized[0]}).",
            "Use the model's file in bf16, fp16 or plain fp8; --precision fp8 is faster still.",
        )
    return [key for key in file.shapes if key.startswith(_PREFIX)] or list(file.shapes)


def _check(model: Any, file: TensorFile, keys: list[str], folder: Path) -> None:
    """Refuse a file of a similar model, of which diffusers would leave weights out."""
    has_guidance = any("guidance" in key for key in keys)
    if has_guidance and not model.config.get("guidance_embeds", True):
        raise CheckpointError(
            f"{file.path} takes a guidance, and the model of {folder} does not.", _SAME_MODEL
        )
