"""Load a checkpoint, a single file or a diffusers folder, without a network."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from onediff_ext.core.errors import CheckpointError, OneDiffError, OptionError
from onediff_ext.core.garbage_collection import without_collection
from onediff_ext.core.typed_paths import given_path
from onediff_ext.engine.out_of_memory import is_out_of_memory
from onediff_ext.hosts.diffusers.checkpoints.architectures import Architecture
from onediff_ext.hosts.diffusers.checkpoints.detect_architecture import (
    architecture_of_unet,
    detect_architecture,
)
from onediff_ext.hosts.diffusers.checkpoints.ldm_checkpoint import (
    Placement,
    read_components,
)
from onediff_ext.hosts.diffusers.checkpoints.ldm_hints import LdmHints, read_hints
from onediff_ext.hosts.diffusers.checkpoints.model_folder import load_folder
from onediff_ext.hosts.diffusers.checkpoints.prediction_type import probe_prediction_type
from onediff_ext.hosts.diffusers.checkpoints.tensor_file import (
    TensorFile,
    open_tensor_file,
    refuse_pickle,
)
from onediff_ext.hosts.diffusers.checkpoints.tensor_read_ahead import TensorReadAhead
from onediff_ext.hosts.diffusers.checkpoints.transformer_file import load_transformer_file
from onediff_ext.hosts.diffusers.schedulers import make_scheduler
from onediff_ext.hosts.diffusers.transformer_models import TransformerModel, transformer_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A loaded checkpoint with its pipeline.

    Args:
        path: The file or folder.
        architecture: "sd1", "sd2", "sdxl", "sdxl-refiner", or a label of `TRANSFORMER_MODELS`.
        pipeline: A diffusers pipeline: text to image; inpainting for 9-channel UNets; image to
            image for the refiner.
        prediction_type: "epsilon", "v_prediction" or "flow".
        zero_snr: The noise levels end in pure noise.
        is_inpaint: The UNet also takes a mask and the masked image.
        is_lcm: The UNet takes the guidance scale as an input (time_cond_proj).
        transformer_model: Of a checkpoint with a transformer in place of a UNet, else None.
    """

    path: Path
    architecture: str
    pipeline: Any
    prediction_type: str
    zero_snr: bool
    is_inpaint: bool
    is_lcm: bool
    transformer_model: TransformerModel | None = None

    @property
    def name(self) -> str:
        """The checkpoint's name, as infotext shows it."""
        return self.path.name if self.path.is_dir() else self.path.stem

    @property
    def components(self) -> dict[str, Any]:
        """Component name → model, as diffusers names them."""
        return dict(self.pipeline.components)


@without_collection()
def load_checkpoint(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    vae_path: str | Path | None = None,
    config: str | Path | None = None,
    read_ahead: TensorReadAhead | None = None,
) -> LoadedCheckpoint:
    """Load a checkpoint.

    Args:
        path: A .safetensors file in the original (LDM) layout, or a diffusers folder. With
            `config`, a .safetensors file with the weights of a transformer.
        dtype: Of the weights; None keeps the file's.
        device: Any device that torch accepts.
        vae_path: A VAE .safetensors file in the original layout that replaces the checkpoint's.
        config: A diffusers folder of the transformer's model, for all that the file has not: text
            encoders, tokenizers, VAE and configuration.
        read_ahead: Has weights of the same file, dtype and device; it is closed here.

    Returns:
        The checkpoint. Its ``pipeline`` is a diffusers pipeline, which `compile_pipe` takes.

    Raises:
        OptionError: An argument has a wrong type, or torch knows no such device.
        CheckpointError: The checkpoint cannot be loaded; message and hint say why and what to do.
    """
    try:
        place = _placement(dtype, device)
        file = given_path(path, "path")
        vae_file, folder = (
            None if given is None else given_path(given, name)
            for given, name in ((vae_path, "vae_path"), (config, "config"))
        )
        return _load_checkpoint(file, place, vae_file, folder, read_ahead)
    finally:
        if read_ahead is not None:
            read_ahead.close()


def _load_checkpoint(
    path: Path,
    place: Placement,
    vae_path: Path | None,
    config: Path | None,
    read_ahead: TensorReadAhead | None,
) -> LoadedCheckpoint:
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise CheckpointError(
            f"There is no checkpoint {path}.", "Check the path; nothing is downloaded."
        )
    if vae_path is not None and (path.is_dir() or config is not None):
        raise CheckpointError(
            "A VAE file goes with a single-file checkpoint only.",
            "Put the VAE into the folder's vae subfolder.",
        )
    if path.is_dir():
        if config is not None:
            raise CheckpointError(
                "A config folder goes with the single file of a transformer only.",
                "Load the folder without it.",
            )
        loaded = _loaded(path, load_folder(path, place))
    elif config is not None:
        loaded = _loaded(path, load_transformer_file(path, config, place))
    else:
        loaded = _load_file(path, place, vae_path, read_ahead)
    logger.info(
        "Loaded %s: %s, %s%s", loaded.name, loaded.architecture, loaded.prediction_type,
        ", inpainting" if loaded.is_inpaint else "",
    )  # fmt: skip
    return loaded


def _placement(dtype: object, device: object) -> Placement:
    """Read dtype and device; torch's own errors come deep inside, and do not name the argument."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise OptionError(f"{dtype!r} is no dtype.", "Pass one of torch, such as torch.float16.")
    try:
        return Placement(dtype, torch.device(device))  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as exc:
        raise OptionError(f"torch knows no device {device!r}.", "Use cpu, cuda or cuda:1.") from exc


def _load_file(
    path: Path, place: Placement, vae_path: Path | None, read_ahead: TensorReadAhead | None
) -> LoadedCheckpoint:
    refuse_pickle(path)
    if path.name == "model_index.json":
        return _loaded(path.parent, load_folder(path.parent, place))
    file = open_tensor_file(path)
    if read_ahead is not None and read_ahead.is_current():
        file = replace(file, take_ahead=read_ahead.take)
    vae_file = None if vae_path is None else open_tensor_file(vae_path)
    try:
        return _loaded(path, _read_file(file, vae_file, place))
    except (OneDiffError, MemoryError):
        raise
    except Exception as exc:  # torch, diffusers and transformers raise any type here
        if is_out_of_memory(exc):
            raise
        reason = str(exc).strip().splitlines()[:1] or [type(exc).__name__]
        raise CheckpointError(
            f"{path} cannot be loaded: {reason[0][:200]}",
            "The file is damaged or of an unknown architecture; use another copy.",
        ) from exc


def _read_file(file: TensorFile, vae_file: TensorFile | None, place: Placement) -> Any:
    architecture = detect_architecture(file)
    hints = read_hints(file)
    parts = read_components(file, hints, place, vae_file)
    noise = _noise(architecture, hints, parts["unet"])
    if architecture.label == "sd2" and hints.sample_size is None:
        # SD2 with noise prediction was trained on 512x512, with v-prediction on 768x768.
        size = 96 if noise["prediction_type"] == "v_prediction" else 64
        parts["unet"].register_to_config(sample_size=size)
        parts["vae"].register_to_config(sample_size=8 * size)
    is_lcm = bool(parts["unet"].config.time_cond_proj_dim)
    parts["scheduler"] = make_scheduler("LCM" if is_lcm else "Euler", noise)
    return _pipeline(architecture.label, parts)


def _noise(architecture: Architecture, hints: LdmHints, unet: Any) -> dict[str, Any]:
    prediction = hints.prediction_type
    if prediction is None:
        prediction = "epsilon"
        full_size = list(unet.config.block_out_channels) == architecture.unet["block_out_channels"]
        if architecture.label == "sd2" and full_size and unet.config.in_channels == 4:
            prediction = probe_prediction_type(unet)
    noise = {**architecture.noise, "prediction_type": prediction}
    if hints.zero_snr:
        # The last training step is pure noise, so sampling has to start there.
        noise |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return noise


def _pipeline(label: str, parts: dict[str, Any]) -> Any:
    import diffusers

    inpaint = parts["unet"].config.in_channels == 9
    if label in ("sd1", "sd2"):
        plain = (
            diffusers.StableDiffusionInpaintPipeline
            if inpaint
            else diffusers.StableDiffusionPipeline
        )
        no_checker = {"safety_checker": None, "feature_extractor": None}
        return plain(**parts, **no_checker, requires_safety_checker=False)
    if label == "sdxl-refiner":
        return diffusers.StableDiffusionXLImg2ImgPipeline(
            **parts, text_encoder=None, tokenizer=None, requires_aesthetics_score=True,
            force_zeros_for_empty_prompt=False, add_watermarker=False,
        )  # fmt: skip
    xl = (
        diffusers.StableDiffusionXLInpaintPipeline
        if inpaint
        else diffusers.StableDiffusionXLPipeline
    )
    return xl(**parts, add_watermarker=False)


def _loaded(path: Path, pipeline: Any) -> LoadedCheckpoint:
    if getattr(pipeline, "unet", None) is None:
        config = pipeline.transformer.config
        model = transformer_model(type(pipeline).__name__, pipeline.config, config)
        assert model is not None  # load_folder refuses others
        return LoadedCheckpoint(
            path, model.label, pipeline, "flow", zero_snr=False, is_inpaint=False, is_lcm=False,
            transformer_model=model,
        )  # fmt: skip
    unet = pipeline.unet.config
    noise = pipeline.scheduler.config
    has_first = getattr(pipeline, "text_encoder", None) is not None
    return LoadedCheckpoint(
        path=path,
        architecture=architecture_of_unet(unet, has_first),
        pipeline=pipeline,
        prediction_type=noise.get("prediction_type", "epsilon"),
        zero_snr=bool(noise.get("rescale_betas_zero_snr", False)),
        is_inpaint=unet.in_channels == 9,
        is_lcm=bool(unet.get("time_cond_proj_dim")),
    )
