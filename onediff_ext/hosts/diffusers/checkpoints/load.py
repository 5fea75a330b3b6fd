"""Load a checkpoint, one file or a diffusers folder, with no network."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onediff_ext.core.errors import CheckpointError, OneDiffError
from onediff_ext.core.garbage_collection import without_collection
from onediff_ext.engine.out_of_memory import is_out_of_memory
from onediff_ext.hosts.diffusers.checkpoints.architectures import Architecture, label_of
from onediff_ext.hosts.diffusers.checkpoints.ldm_checkpoint import (
    Placement,
    find_architecture,
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
from onediff_ext.hosts.diffusers.schedulers import make_scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint, ready to make pictures.

    Args:
        path: The file or folder.
        architecture: "sd1", "sd2", "sdxl" or "sdxl-refiner".
        pipeline: A diffusers pipeline: text to image, for 9-channel UNets inpainting, for the
            refiner image to image.
        prediction_type: "epsilon" or "v_prediction".
        zero_snr: The noise levels end in pure noise.
        is_inpaint: The UNet also takes a mask and the masked image.
        is_lcm: The UNet takes the guidance scale as an input (time_cond_proj).
    """

    path: Path
    architecture: str
    pipeline: Any
    prediction_type: str
    zero_snr: bool
    is_inpaint: bool
    is_lcm: bool

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
) -> LoadedCheckpoint:
    """Load a checkpoint.

    Args:
        path: A .safetensors file in the original (LDM) layout, or a diffusers folder.
        dtype: Of the weights; None keeps the file's.
        device: As torch takes it.
        vae_path: A VAE .safetensors file in the original layout, in place of the checkpoint's.

    Raises:
        CheckpointError: It cannot be loaded; message and hint say why and what to do.
    """
    path = Path(path).expanduser()
    if not os.path.exists(path):  # Path's own test raises for a name that is too long
        raise CheckpointError(
            f"There is no checkpoint {path}.", "Check the path; nothing is downloaded."
        )
    place = Placement(dtype, device)
    if path.is_dir():
        loaded = _loaded(path, load_folder(path, place))
        if vae_path is not None:
            raise CheckpointError(
                "A VAE file goes with a single-file checkpoint only.",
                "Put the VAE into the folder's vae subfolder.",
            )
    else:
        loaded = _load_file(path, place, None if vae_path is None else Path(vae_path))
    logger.info(
        "Loaded %s: %s, %s%s", loaded.name, loaded.architecture, loaded.prediction_type,
        ", inpainting" if loaded.is_inpaint else "",
    )  # fmt: skip
    return loaded


def _load_file(path: Path, place: Placement, vae_path: Path | None) -> LoadedCheckpoint:
    refuse_pickle(path)
    if path.name == "model_index.json":
        return _loaded(path.parent, load_folder(path.parent, place))
    file = open_tensor_file(path)
    vae_file = None if vae_path is None else open_tensor_file(vae_path.expanduser())
    try:
        return _loaded(path, _read_file(file, vae_file, place))
    except (OneDiffError, MemoryError):
        raise
    except Exception as exc:  # torch, diffusers and transformers, at shapes that make no model
        if is_out_of_memory(exc):
            raise
        reason = str(exc).strip().splitlines()[:1] or [type(exc).__name__]
        raise CheckpointError(
            f"{path} cannot be loaded: {reason[0][:200]}",
            "The file is damaged or of an unknown architecture; use another copy.",
        ) from exc


def _read_file(file: TensorFile, vae_file: TensorFile | None, place: Placement) -> Any:
    architecture = find_architecture(file)
    hints = read_hints(file)
    parts = read_components(file, hints, place, vae_file)
    noise = _noise(architecture, hints, parts["unet"])
    if architecture.label == "sd2" and hints.sample_size is None:
        # SD2 that predicts noise was trained on 512x512, the other on 768x768.
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
    unet = pipeline.unet.config
    noise = pipeline.scheduler.config
    has_first = getattr(pipeline, "text_encoder", None) is not None
    return LoadedCheckpoint(
        path=path,
        architecture=label_of(unet, has_first),
        pipeline=pipeline,
        prediction_type=noise.get("prediction_type", "epsilon"),
        zero_snr=bool(noise.get("rescale_betas_zero_snr", False)),
        is_inpaint=unet.in_channels == 9,
        is_lcm=bool(unet.get("time_cond_proj_dim")),
    )
