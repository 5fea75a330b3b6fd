"""The adapter of Forge: models that come and go, LoRAs that replace weights.

Forge merges LoRAs into the weights before the UNet's first call, so nothing is
pending while it draws; each block reads its weights anew at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.core.shapes import CELL_PX, BatchShape
from onediff_ext.engine.blocks.family import BlockFamily
from onediff_ext.engine.blocks.weight_slots import WrapperRule
from onediff_ext.engine.patches import Patches
from onediff_ext.hosts.base import HostCheckpoint, WebUIHost, control_components
from onediff_ext.hosts.forge.attention import forge_attention
from onediff_ext.hosts.forge.blocks import FORGE, forge_families
from onediff_ext.hosts.timestep_embedding import TimestepEmbeddings

# How far the VAE is tried while warming up: its kinds do not depend on the size.
_VAE_CELLS = (16, 24)
# UNets that consist of blocks known here; Flux, SD3 and others have transformers only.
_UNETS = frozenset({"IntegratedUNet2DConditionModel", "UNetModel"})
_QUANTISED = ("nf4", "fp4", "gguf")


class ForgeHost(WebUIHost):
    """Forge: a new model object at every checkpoint, loaded when it is first needed."""

    name = "forge"

    def __init__(self) -> None:
        self._embeddings = TimestepEmbeddings()

    def families(self) -> Sequence[BlockFamily]:
        return forge_families(FORGE, forge_attention())

    def rules(self) -> Sequence[WrapperRule]:
        return ()  # LoRAs are merged into the weights

    def checkpoint(self) -> HostCheckpoint | None:
        model = self.loaded_model()
        info = getattr(model, "sd_checkpoint_info", None)
        if info is None:
            return None
        architecture = _architecture(self.model_config(model))
        return HostCheckpoint(
            info.name_for_extra,
            info.shorthash or "",
            architecture,
            content_hash=info.sha256 or "",  # none with --no-hashing
            path=info.filename,
        )

    def models(self, ignores: frozenset[str]) -> list[tuple[str, nn.Module]]:
        objects = _objects(self.loaded_model())
        if objects is None:
            return []
        candidates: list[tuple[str, Any]] = [("unet", objects.unet.model.diffusion_model)]
        vae = objects.vae.first_stage_model
        for part in ("encoder", "decoder"):
            candidates.append((f"vae_{part}", getattr(vae, part, None)))
        if "controlnet" not in ignores:
            controls = objects.unet.list_controlnets()  # of this job, the latest first
            candidates += control_components(getattr(c, "control_model", None) for c in controls)
        return [
            (name, module)
            for name, module in candidates
            if name not in ignores and isinstance(module, nn.Module)
        ]

    def refusal_reason(self, job: Any) -> str | None:  # noqa: ARG002
        objects = _objects(self.loaded_model())
        if objects is None:
            return None  # the host loads one before it samples
        unet = objects.unet
        name = type(unet.model.diffusion_model).__name__
        if name not in _UNETS:
            return f"models of class {name} are not supported"
        storage = getattr(unet.model, "storage_dtype", None)
        if storage in _QUANTISED:
            return f"weights are stored as {storage}"
        if self.applies_loras_online(unet):
            return "the LoRA is applied at each call (fp16 LoRA)"
        return None

    def attach(self, patches: Patches, model: nn.Module, component: str) -> None:
        # Nothing for LoRAs: they are merged before the first call, and weights are read at each.
        if component == "unet":
            self.make_capturable(patches, model)

    def weights(self) -> Hashable:
        objects = _objects(self.loaded_model())
        unet = getattr(objects, "unet", None)
        # Forge keeps LoRAs by file and strength; reForge gives a patcher a number for them.
        loras = tuple(getattr(unet, "lora_patches", None) or ())
        return super().weights(), loras, getattr(unet, "patches_uuid", None)

    def owner(self, component: str, model: nn.Module) -> object | None:  # noqa: ARG002
        loaded = self.loaded_model()
        return loaded if _objects(loaded) is not None else None

    def step(self, shape: BatchShape, noise: torch.Generator) -> None:
        objects = _objects(self.loaded_model())
        if objects is None:
            return
        unet = objects.unet
        self.move_to_device([unet])
        model, count = unet.model.diffusion_model, 2 * shape.batch
        height, width = shape.height_px // CELL_PX, shape.width_px // CELL_PX
        form = {"device": unet.load_device, "dtype": self.computation_dtype(unet)}
        # x [2B, C, H/8, W/8], timesteps [2B], context [2B, 77, D], y [2B, A] on SDXL only
        x = torch.randn(count, model.in_channels, height, width, generator=noise).to(**form)
        context = torch.randn(count, 77, _context_width(model), generator=noise).to(**form)
        extra = {}
        if getattr(model, "num_classes", None) is not None:
            features = model.label_emb[0][0].in_features
            extra["y"] = torch.randn(count, features, generator=noise).to(**form)
        timesteps = torch.randint(1000, (1,), generator=noise).to(unet.load_device, torch.float32)
        with torch.inference_mode():
            model(
                x,
                timesteps.repeat(count),
                context=context,
                control=None,
                transformer_options={},
                **extra,
            )

    def vae_step(self) -> None:
        objects = _objects(self.loaded_model())
        if objects is None:
            return
        vae, noise = objects.vae, torch.Generator().manual_seed(0)
        self.move_to_device([vae.patcher])
        form = {"device": vae.device, "dtype": vae.vae_dtype}
        latent = torch.randn(1, vae.latent_channels, *_VAE_CELLS, generator=noise).to(**form)
        image = torch.randn(1, 3, *(CELL_PX * n for n in _VAE_CELLS), generator=noise).to(**form)
        with torch.inference_mode():
            vae.first_stage_model.decoder(latent)
            vae.first_stage_model.encoder(image)

    def run_exclusively(self, task: Callable[[], None]) -> None:
        from modules.call_queue import queue_lock

        with queue_lock:
            self.load_model()
            task()

    # ------------------------------------------------------------ what differs in reForge

    def loaded_model(self) -> Any:
        """The host's model, without loading one that is not there yet."""
        from modules import sd_models

        return sd_models.model_data.sd_model

    def load_model(self) -> None:
        """Load what the user has chosen, as the next job would."""
        from modules import sd_models

        sd_models.forge_model_reload()

    def model_config(self, model: Any) -> object:
        """What the host has found out about a checkpoint."""
        return model.model_config

    def applies_loras_online(self, unet: Any) -> bool:
        """Whether a LoRA of the UNet's patcher is added at each call, not merged."""
        return bool(unet.has_online_lora())

    def move_to_device(self, trusted_patchers: list[Any]) -> None:
        """Bring models where they compute, as the host does before sampling."""
        from backend import memory_management

        memory_management.load_models_gpu(trusted_patchers)

    def computation_dtype(self, unet: Any) -> torch.dtype:
        """What the UNet's inputs are cast to."""
        dtype: torch.dtype = unet.model.computation_dtype
        return dtype

    def make_capturable(self, patches: Patches, unet: nn.Module) -> None:
        """Make it possible to record the UNet's forward as a CUDA graph."""
        self._embeddings.install(patches, unet)
        patches.hook(unet.register_forward_pre_hook(_without_controlnet, with_kwargs=True), unet)


def _objects(model: Any) -> Any:
    """The patchers that the host draws with, or None before the first load."""
    return getattr(model, "forge_objects", None)


def _context_width(unet: nn.Module) -> int:
    """Width of a token of the prompt, from the first cross-attention."""
    for name, module in unet.named_modules():
        if name.endswith("attn2.to_k"):
            width: int = module.weight.shape[1]
            return width
    return 0


def _architecture(config: object) -> str:
    """From the class that the host chose by the shapes of the weights."""
    name = type(config).__name__
    known = (("SDXLRefiner", "sdxl-refiner"), ("SDXL", "sdxl"), ("SD15", "sd1"), ("SD2", "sd2"))
    return next((value for prefix, value in known if name.startswith(prefix)), "unknown")


def _without_controlnet(
    _model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook before the UNet: leaves out the ControlNet that Forge hands on to it, though the UNet
    takes no notice of it: an object of any kind is nothing that a capture can know to be the same.
    What the ControlNet has computed are tensors in ``control``."""
    return tuple(args), {name: v for name, v in kwargs.items() if name != "control_model"}
