"""The adapter of Forge and of its descendants.

They replace weights for LoRAs and models for checkpoints. They merge LoRAs into the weights before
the UNet's first call, so nothing is pending while they draw. Each block reads its weights at every
call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.core.components import ComponentId, Role
from onediff_ext.core.shapes import CELL_PX, BatchShape
from onediff_ext.engine.blocks.weight_slots import WrapperRule
from onediff_ext.engine.patches import Patches
from onediff_ext.hosts.base import HostCheckpoint, WebUIHost, control_components
from onediff_ext.hosts.forge_denoisers import (
    UNETS,
    Denoiser,
    StepNoise,
    as_in_sampling,
    denoiser_of,
)
from onediff_ext.hosts.forge_memory import MemoryFunctions, StreamedLayers
from onediff_ext.hosts.forge_weight_functions import LowVramPatches
from onediff_ext.hosts.pinned_moves import PinnedMoves
from onediff_ext.hosts.timestep_embedding import TimestepEmbeddings

# Height and width of the VAE's warm-up in latent cells: its kinds do not depend on the size.
_VAE_CELLS = (16, 24)
_QUANTIZED = ("nf4", "fp4", "gguf")
# Beginnings of the names of the hosts' model classes. Mugen is SDXL with another VAE.
_ARCHITECTURES = (
    ("SDXLRefiner", "sdxl-refiner"),
    ("SDXL", "sdxl"),
    ("Mugen", "sdxl"),
    ("SD15", "sd1"),
    ("SD2", "sd2"),
)


class ForgeFamilyHost(WebUIHost):
    """Forge or a descendant: each checkpoint is a new model object, loaded when first needed.

    Attributes:
        denoisers: The classes of UNets and transformers whose blocks are known.
        weight_functions: As `ForgePackage.weight_functions`.
    """

    denoisers: Mapping[str, Denoiser] = UNETS
    weight_functions: Sequence[LowVramPatches] = ()

    def __init__(self) -> None:
        self._embeddings = TimestepEmbeddings()
        moves = PinnedMoves()
        self._streamed = StreamedLayers(moves, self.weight_functions)
        self._memory = MemoryFunctions(moves, self._streamed)

    def rules(self) -> Sequence[WrapperRule]:
        return ()  # LoRAs are merged into the weights

    def checkpoint(self) -> HostCheckpoint | None:
        model = self.loaded_model()
        info = getattr(model, "sd_checkpoint_info", None)
        if info is None:
            return None
        known = denoiser_of(model.forge_objects.unet.model.diffusion_model, self.denoisers)
        named = "" if known is None else known.architecture
        architecture = named or _architecture(self.model_config(model))
        return HostCheckpoint(
            info.name_for_extra,
            info.shorthash or "",
            architecture,
            content_hash=info.sha256 or "",  # none with --no-hashing
            path=info.filename,
        )

    def models(self, ignores: frozenset[str]) -> list[tuple[ComponentId, nn.Module]]:
        objects = forge_objects(self.loaded_model())
        if objects is None:
            return []
        vae, network = objects.vae.first_stage_model, objects.unet.model.diffusion_model
        known = denoiser_of(network, self.denoisers)
        candidates: list[tuple[ComponentId, Any]] = [
            (ComponentId(Role.UNET if known is None else known.role), network),
            (ComponentId(Role.VAE_ENCODER), getattr(vae, "encoder", None)),
            (ComponentId(Role.VAE_DECODER), getattr(vae, "decoder", None)),
        ]
        if Role.CONTROLNET not in ignores:
            controls = objects.unet.list_controlnets()  # of this job, the latest first
            candidates += control_components(getattr(c, "control_model", None) for c in controls)
        return [
            (component, module)
            for component, module in candidates
            if component.role not in ignores and isinstance(module, nn.Module)
        ]

    def refusal_reason(self, job: Any) -> str | None:  # noqa: ARG002
        objects = forge_objects(self.loaded_model())
        if objects is None:
            return None  # the host loads one before it samples
        unet = objects.unet
        name = type(unet.model.diffusion_model).__name__
        if name not in self.denoisers:
            return f"{name} runs without graphs: its blocks are not known"
        storage = getattr(unet.model, "storage_dtype", None)
        if storage in _QUANTIZED:
            return f"weights are stored as {storage}"
        if self.applies_loras_online(unet):
            return "the LoRA is applied at each call (fp16 LoRA)"
        return None

    def attach(self, patches: Patches, model: nn.Module, component: ComponentId) -> None:
        # LoRAs need nothing: they are merged before the first call.
        if component.role.is_denoiser:
            self.make_capturable(patches, model)
        patches.hook(model.register_forward_hook(self._streamed.wait), model)

    def weights(self) -> Hashable:
        objects = forge_objects(self.loaded_model())
        unet = getattr(objects, "unet", None)
        # Forge lists LoRAs by file and strength; reForge numbers a patcher's set of them.
        loras = tuple(getattr(unet, "lora_patches", None) or ())
        return super().weights(), loras, getattr(unet, "patches_uuid", None)

    def split_calls_reason(self, denoiser: object) -> str | None:
        unet = getattr(forge_objects(self.loaded_model()), "unet", None)
        wrapper = (getattr(unet, "model_options", None) or {}).get("model_function_wrapper")
        if wrapper is not None:
            return self.own_way_reason(wrapper)
        return super().split_calls_reason(denoiser)

    def owner(self, component: ComponentId, model: nn.Module) -> object | None:  # noqa: ARG002
        loaded = self.loaded_model()
        return loaded if forge_objects(loaded) is not None else None

    def transformer_options(self, unet: Any) -> Mapping[str, Any]:
        """Return what the host's samplers pass in ``transformer_options`` for a whole picture.

        Args:
            unet: The host's patcher.
        """
        options = getattr(unet, "model_options", None) or {}
        found: Mapping[str, Any] = options.get("transformer_options", {})
        return found

    def step(self, shape: BatchShape, noise: torch.Generator) -> None:
        objects = forge_objects(self.loaded_model())
        if objects is None:
            return
        unet = objects.unet
        model = unet.model.diffusion_model
        known = denoiser_of(model, self.denoisers)
        if known is None:
            return
        self.move_to_device([unet])
        cells = StepNoise(
            shape.batch,
            shape.height_px // CELL_PX,
            shape.width_px // CELL_PX,
            unet.load_device,
            self.computation_dtype(unet),
            noise,
        )
        options = self.transformer_options(unet)
        args, kwargs = as_in_sampling(known.arguments(model, cells), shape.batch, options)
        with torch.inference_mode():
            model(*args, **kwargs)

    def vae_step(self) -> None:
        objects = forge_objects(self.loaded_model())
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

    # ------------------------------------------------------------ what differs between hosts

    def loaded_model(self) -> Any:
        """The host's model, without loading one that is not there yet."""
        from modules import sd_models

        return sd_models.model_data.sd_model

    def load_model(self) -> None:
        """Load the checkpoint that the user has chosen, as the next job would."""
        from modules import sd_models

        sd_models.forge_model_reload()

    def model_config(self, model: Any) -> object:
        """The host's description of a checkpoint."""
        return model.model_config

    def applies_loras_online(self, unet: Any) -> bool:
        """Whether a LoRA of the UNet's patcher is added at each call instead of merged."""
        return bool(unet.has_online_lora())

    def move_to_device(self, trusted_patchers: list[Any]) -> None:
        """Bring models to their device, as the host does before sampling."""
        self.memory_management().load_models_gpu(trusted_patchers)

    def computation_dtype(self, unet: Any) -> torch.dtype:
        """The dtype that the UNet's inputs are cast to."""
        dtype: torch.dtype = unet.model.computation_dtype
        return dtype

    def memory_management(self) -> Any:
        """The host's Python module that knows and frees the GPU's memory."""
        from backend import memory_management

        return memory_management

    def device(self) -> torch.device | None:
        objects = forge_objects(self.loaded_model())
        return None if objects is None else objects.unet.load_device

    def share_memory(
        self,
        patches: Patches,
        make_room: Callable[[int, torch.device], None],
        returnable: Callable[[], int],
    ) -> None:
        self._memory.share(self.memory_management(), patches, make_room, returnable)

    def speed_up_moves(self, patches: Patches) -> None:
        self._memory.speed_up_moves(self.memory_management(), patches)

    def make_capturable(self, patches: Patches, unet: nn.Module) -> None:
        """Make it possible to record a UNet's or transformer's forward as a CUDA graph."""
        known, device = denoiser_of(unet, self.denoisers), self.device()
        if known is not None and device is not None:
            known.embeddings(self._embeddings, patches, unet, device)
        patches.hook(unet.register_forward_pre_hook(_without_controlnet, with_kwargs=True), unet)


def forge_objects(model: Any) -> Any:
    """The patchers that the host draws with, or None before the first load."""
    return getattr(model, "forge_objects", None)


def _architecture(config: object) -> str:
    """The architecture, from the class that the host chose by the shapes of the weights."""
    name = type(config).__name__
    return next((value for prefix, value in _ARCHITECTURES if name.startswith(prefix)), "unknown")


def _without_controlnet(
    _model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A pre-hook of the UNet that removes the argument ``control_model``.

    Forge passes its ControlNet to the UNet, which ignores it: the ControlNet's results are tensors
    in ``control``. A CUDA graph cannot tell whether such an object is unchanged.
    """
    return tuple(args), {name: v for name, v in kwargs.items() if name != "control_model"}
