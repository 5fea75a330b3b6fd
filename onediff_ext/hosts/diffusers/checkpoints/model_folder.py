"""Load a diffusers folder (`model_index.json`) without a network and without pickles."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.core.errors import CheckpointError, UnsafeFileError
from onediff_ext.core.untrusted_files import read_regular
from onediff_ext.core.words import first_line
from onediff_ext.engine.out_of_memory import is_out_of_memory
from onediff_ext.hosts.diffusers.checkpoints.tensor_file import open_tensor_file
from onediff_ext.hosts.diffusers.transformer_models import TRANSFORMER_MODELS

if TYPE_CHECKING:
    from onediff_ext.hosts.diffusers.checkpoints.ldm_checkpoint import Placement

PIPELINES = (
    "StableDiffusionPipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionInpaintPipeline",
    "StableDiffusionXLPipeline",
    "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusionXLInpaintPipeline",
    "LatentConsistencyModelPipeline",
    *(model.class_name(task) for model in TRANSFORMER_MODELS for task in model.tasks),
)
"""Values of `_class_name` in model_index.json that can be drawn with."""

_CLASSES = {
    "diffusers": re.compile(
        r"UNet2DConditionModel|AutoencoderKL(Flux2|QwenImage)?|AutoencoderTiny|\w+Scheduler"
        r"|(SD3|Flux|Flux2|Chroma|QwenImage|ZImage|Lumina2)Transformer2DModel"
    ),
    "transformers": re.compile(
        r"CLIP(TextModel(WithProjection)?|Tokenizer(Fast)?|ImageProcessor|FeatureExtractor"
        r"|VisionModelWithProjection)"
        r"|T5(EncoderModel|Tokenizer(Fast)?)|Qwen2Tokenizer(Fast)?"
        r"|Qwen2_5_VLForConditionalGeneration|Qwen3(ForCausalLM|Model)"
        r"|Gemma(Tokenizer(Fast)?|2Model)|PreTrainedTokenizerFast|TokenizersBackend"
    ),
}
"""Library → allowed classes of a component."""

_LEFT_OUT = ("safety_checker", "feature_extractor")
"""Components that are not loaded where the model has a safety checker."""

_MAX_INDEX_BYTES = 2**20
_AGAIN = "Download the folder again, as a whole."


def checked_index(folder: Path) -> dict[str, Any]:
    """Read the `model_index.json` of a diffusers folder, and refuse what might run code.

    Raises:
        CheckpointError: The folder is not one of a model that can be drawn with.
    """
    _refuse_other_files(folder)
    index = _read_index(folder)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str):
        raise CheckpointError(
            f"The model_index.json of {folder} names no pipeline (_class_name).", _AGAIN
        )
    if class_name not in PIPELINES:
        raise CheckpointError(
            f"{folder} holds a {class_name}, which cannot be drawn with.",
            "docs/transformers.md lists the models; compile_pipe takes any diffusers pipeline.",
        )
    _refuse_other_code(folder, index)
    return index


def load_folder(folder: Path, place: Placement, **given: Any) -> Any:
    """Load the pipeline of a diffusers folder.

    Args:
        folder: The folder.
        place: dtype and device.
        given: Models that are loaded already, by the names of components.

    Raises:
        CheckpointError: The folder is not a Stable Diffusion model, is incomplete, or has only
            pickled weights.
    """
    import diffusers
    from packaging.version import Version

    index = checked_index(folder)
    class_name = str(index["_class_name"])
    # diffusers 0.42 renamed the argument.
    dtype_name = "dtype" if Version(diffusers.__version__) >= Version("0.42") else "torch_dtype"
    options: dict[str, Any] = {
        dtype_name: place.dtype or _stored_dtype(folder),
        "variant": _variant(folder),
        **given,
    }
    if "safety_checker" in index:
        options |= {"safety_checker": None, "feature_extractor": None}
        options["requires_safety_checker"] = False
    if class_name.startswith("StableDiffusionXL"):
        options["add_watermarker"] = False
    # LatentConsistencyModelPipeline has the same components; one class serves text to image.
    name = "StableDiffusionPipeline" if class_name.startswith("Latent") else class_name
    try:
        pipeline = getattr(diffusers, name).from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, **options
        )
    except MemoryError:
        raise
    except Exception as exc:  # diffusers and transformers raise any type here
        if is_out_of_memory(exc):
            raise
        reason = first_line(str(exc), type(exc).__name__)
        raise CheckpointError(f"{folder} cannot be loaded: {reason}", _AGAIN) from exc
    return pipeline.to(place.device)


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / "model_index.json"
    if not path.exists():
        inside = sorted(folder.glob("*.safetensors"))
        raise CheckpointError(
            f"The folder {folder} has no model_index.json.",
            f"Did you mean the file {inside[0].name} in it?"
            if inside
            else "Choose the top folder of a diffusers model, or a .safetensors file.",
        )
    try:
        index = json.loads(read_regular(path, limit_bytes=_MAX_INDEX_BYTES, limit_s=30.0))
        return dict(index)
    except UnsafeFileError as exc:
        raise CheckpointError(exc.message, _AGAIN) from exc
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror}.", _AGAIN) from exc
    except (ValueError, TypeError, RecursionError) as exc:
        raise CheckpointError(f"{path} is damaged: {exc}.", _AGAIN) from exc


def _refuse_other_files(folder: Path) -> None:
    """Refuse a folder with pipes, devices or sockets: reading one may never return."""
    waiting = [str(folder)]  # no recursion: folders may be nested deeper than Python calls
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:
            continue  # loading says so, if it looks there
        waiting.extend(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
        for path in (entry.path for entry in entries):
            if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
                raise CheckpointError(f"{path} is not an ordinary file.", _AGAIN)


def _refuse_other_code(folder: Path, index: dict[str, Any]) -> None:
    """Refuse components of unknown classes.

    diffusers imports a component's library by its name in model_index.json. Versions without
    ``trust_remote_code`` also run a ``.py`` file of that name from the component's folder.
    """
    left_out = _LEFT_OUT if "safety_checker" in index else ()
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, (list, tuple)) or name in left_out:
            continue
        library, class_name = value if len(value) == 2 else ("", "")
        if (library, class_name) == (None, None):
            continue
        known = _CLASSES.get(str(library))
        if known is None or not known.fullmatch(str(class_name)):
            raise CheckpointError(
                f"{folder}: its {name} is {library}.{class_name}, which is no known class of"
                " these models and might run code from the folder.",
                "Use the model's original folder.",
            )


def _variant(folder: Path) -> str | None:
    """Return "fp16" when the folder has only half-precision weights, else None."""
    weights = _denoiser_folder(folder)
    full = list(weights.glob("diffusion_pytorch_model*.safetensors"))
    half = [path for path in full if ".fp16." in path.name]
    if not full and list(weights.glob("*.bin")):
        raise CheckpointError(
            f"{folder} holds pickled weights (.bin), and opening a pickle runs whatever code is"
            " inside.",
            "Use the model's safetensors weights; OneDiff never needs --disable-safe-unpickle.",
        )
    return "fp16" if half and len(half) == len(full) else None


def _stored_dtype(folder: Path) -> Any:
    """Return the dtype of the denoiser's weights, which diffusers would widen to float32."""
    weights = sorted(_denoiser_folder(folder).glob("*.safetensors"))
    return open_tensor_file(weights[0]).dtype() if weights else None


def is_transformer_folder(folder: Path) -> bool:
    """Whether a diffusers folder's denoiser is a transformer and no UNet.

    Args:
        folder: Any path; a file is no such folder.
    """
    return (folder / "transformer").is_dir()


def _denoiser_folder(folder: Path) -> Path:
    """The subfolder of the transformer, or of the UNet."""
    return folder / ("transformer" if is_transformer_folder(folder) else "unet")
