"""The adapter of AUTOMATIC1111's Stable Diffusion WebUI."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from onediff_ext.core.components import ComponentId, Role
from onediff_ext.core.shapes import CELL_PX, BatchShape
from onediff_ext.engine.blocks.family import BlockFamily
from onediff_ext.engine.blocks.weight_slots import WrapperRule
from onediff_ext.engine.patches import Patches
from onediff_ext.engine.validity.foreign_code import replaced_methods
from onediff_ext.hosts.a1111.blocks import AttentionSetting, ldm_families
from onediff_ext.hosts.a1111.controlnet import control_models, owner_of
from onediff_ext.hosts.a1111.eager_reasons import attention_eager_reason, job_eager_reason
from onediff_ext.hosts.a1111.lora import LAYER_ATTRS, PendingNetworks, loaded_loras
from onediff_ext.hosts.a1111.lowvram import bring_to_gpu, moved_models
from onediff_ext.hosts.base import HostCheckpoint, WebUIHost, control_components
from onediff_ext.hosts.pinned_moves import PinnedMoves, use_pinned_memory
from onediff_ext.hosts.timestep_embedding import TimestepEmbeddings

# Height and width of the VAE's warm-up, in latent cells.
_VAE_CELLS = (16, 24)
# What others than Lora keep on layers and blocks: fp8 storage, and ControlNet, which never takes
# away what its reference mode has noted.
_OTHER_LAYER_ATTRS = frozenset(
    {
        "fp16_weight",
        "fp16_bias",
        "bank",
        "style_cfgs",
        "attn_weight",
        "lllite_list",
    }
)


class A1111Host(WebUIHost):
    """AUTOMATIC1111 1.10: one model object whose weights change under it."""

    name = "a1111"
    host_owned = frozenset({Role.CONTROLNET})

    def __init__(self) -> None:
        self._pending: WeakKeyDictionary[nn.Module, PendingNetworks] = WeakKeyDictionary()
        self._embeddings = TimestepEmbeddings(_embedding_settings)
        self._moves = PinnedMoves()

    def families(self) -> Sequence[BlockFamily]:
        from modules import shared

        setting = AttentionSetting(
            upcast=lambda: bool(shared.opts.upcast_attn), refusal_reason=attention_eager_reason
        )
        return ldm_families(LAYER_ATTRS | _OTHER_LAYER_ATTRS, setting)

    def rules(self) -> Sequence[WrapperRule]:
        return ()  # LoRAs are merged into the weights

    def checkpoint(self) -> HostCheckpoint | None:
        model = _loaded_model()
        info = getattr(model, "sd_checkpoint_info", None)
        if info is None:
            return None
        return HostCheckpoint(
            info.name_for_extra,
            info.shorthash or "",
            _architecture(model),
            content_hash=info.sha256 or "",
            path=info.filename,
        )

    def models(self, ignores: frozenset[str]) -> list[tuple[ComponentId, nn.Module]]:
        model = _loaded_model()
        if model is None:
            return []
        unet = getattr(model.model, "diffusion_model", None)
        vae = getattr(model, "first_stage_model", None)
        candidates: list[tuple[ComponentId, Any]] = [
            (ComponentId(Role.UNET), unet),
            (ComponentId(Role.VAE_ENCODER), getattr(vae, "encoder", None)),
            (ComponentId(Role.VAE_DECODER), getattr(vae, "decoder", None)),
        ]
        if Role.CONTROLNET not in ignores:
            candidates += control_components(control_models(unet))
        return [
            (component, module)
            for component, module in candidates
            if component.role not in ignores and isinstance(module, nn.Module)
        ]

    def refusal_reason(self, job: Any) -> str | None:
        return job_eager_reason(_loaded_model(), job)

    def attach(self, patches: Patches, model: nn.Module, component: ComponentId) -> None:
        if component.role is Role.UNET:
            # The same hook in each job: another hook would be a change that drops CUDA graphs.
            pending = self._pending.setdefault(model, PendingNetworks())
            pending.find_layers(model)
            patches.hook(model.register_forward_pre_hook(pending), model)
            self._embeddings.install(patches, model)

    def state(self) -> Hashable:
        import ldm.modules.attention
        import sgm.modules.attention
        from modules import devices, sd_hijack, shared

        return (
            sd_hijack.model_hijack.circular_enabled,  # "tiling" sets each convolution's padding
            getattr(_loaded_model(), "applied_token_merged_ratio", 0),
            bool(shared.opts.upcast_attn),
            devices.dtype_unet,
            ldm.modules.attention.CrossAttention.forward,
            sgm.modules.attention.CrossAttention.forward,
        )

    def weights(self) -> Hashable:
        return super().weights(), loaded_loras()

    def split_calls_reason(self, denoiser: object) -> str | None:
        model = _loaded_model()
        if "apply_model" in replaced_methods(model):
            return self.own_way_reason(model.apply_model)
        return super().split_calls_reason(denoiser)

    def owner(self, component: ComponentId, model: nn.Module) -> object | None:
        return owner_of(model) if component.role in self.host_owned else None

    def device(self) -> torch.device | None:
        from modules import devices

        device = torch.device(devices.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return device

    def speed_up_moves(self, patches: Patches) -> None:
        use_pinned_memory(self._moves, patches, moved_models(_loaded_model()))

    def step(self, shape: BatchShape, noise: torch.Generator) -> None:
        from modules import devices

        model = _loaded_model()
        if model is None:
            return
        bring_to_gpu(model.model)
        unet = model.model.diffusion_model
        height, width = shape.height_px // CELL_PX, shape.width_px // CELL_PX
        count = 2 * shape.batch  # with CFG: one for the prompt and one for the negative
        form = {"device": devices.device, "dtype": devices.dtype_unet}
        # x [2B, C, H/8, W/8], timesteps [2B], context [2B, 77, D], y [2B, A] on SDXL only
        channels = unet.input_blocks[0][0].in_channels
        x = torch.randn(count, channels, height, width, generator=noise).to(**form)
        tokens = model.cond_stage_model_empty_prompt.shape[1:]
        context = torch.randn(count, *tokens, generator=noise).to(**form)
        extra = {}
        if getattr(unet, "num_classes", None) is not None:
            features = unet.label_emb[0][0].in_features
            extra["y"] = torch.randn(count, features, generator=noise).to(**form)
        timesteps = torch.randint(1000, (1,), generator=noise).to(**form).repeat(count)
        # A CUDA graph serves one form of call. sgm passes timesteps by name, ldm by place.
        is_sgm = getattr(model, "is_sdxl", False)
        args, named = ((x,), {"timesteps": timesteps}) if is_sgm else ((x, timesteps), {})
        with torch.no_grad(), devices.autocast():
            unet(*args, **named, context=context, **extra)

    def vae_step(self) -> None:
        from modules import devices

        vae = getattr(_loaded_model(), "first_stage_model", None)
        if vae is None:
            return
        bring_to_gpu(vae)
        noise = torch.Generator().manual_seed(0)
        form = {"device": devices.device, "dtype": devices.dtype_vae}
        # image [1, 3, H, W] → moments [1, 2C, H/8, W/8], of which C are a latent
        image = torch.randn(1, 3, *(CELL_PX * n for n in _VAE_CELLS), generator=noise).to(**form)
        with torch.no_grad():
            with devices.autocast():  # the host decodes without it
                moments = vae.encoder(image)
            vae.decoder(moments.chunk(2, dim=1)[0].to(devices.dtype_vae))

    def run_exclusively(self, task: Callable[[], None]) -> None:
        from modules.call_queue import queue_lock

        with queue_lock:
            task()


def _embedding_settings() -> Hashable:
    from modules import devices

    return devices.dtype_unet, devices.unet_needs_upcast


def _loaded_model() -> Any:
    """The host's model, without loading one that is not there yet."""
    from modules import sd_models

    return sd_models.model_data.sd_model


def _architecture(model: Any) -> str:
    if getattr(model, "is_sdxl", False):
        return "sdxl" if hasattr(model.conditioner.embedders[0], "wrapped") else "sdxl-refiner"
    for field, name in (("is_sd2", "sd2"), ("is_sd1", "sd1")):
        if getattr(model, field, False):
            return name
    return "unknown"
