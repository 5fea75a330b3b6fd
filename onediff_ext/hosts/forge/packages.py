"""Where Forge and reForge keep their blocks and layers."""

from __future__ import annotations

import sys

from onediff_ext.hosts.forge_blocks import ForgePackage, uses_backend_stream
from onediff_ext.hosts.forge_weight_functions import COPY_HELPERS, LowVramPatches


def _uses_offload_streams() -> bool:
    management = sys.modules.get("ldm_patched.modules.model_management")
    return getattr(management, "NUM_STREAMS", 1) > 1


FORGE = ForgePackage(
    unet="backend.nn.unet",
    transformer="backend.nn.unet",
    vae="backend.nn.vae",
    layers=("backend.operations.ForgeOperations.",),
    casts="parameters_manual_cast",
    ignored_attrs=frozenset(
        {
            "parameters_manual_cast",
            "prev_parameters_manual_cast",
            "total_mem",
            "weight_mem",
            "extra_mem",
            "forge_online_loras",
        }
    ),
    dynamic_weight_attrs=("forge_online_loras",),
    copies_on_own_stream=uses_backend_stream,
    per_image=(
        "backend.nn.unet.IntegratedUNet2DConditionModel",
        "backend.nn.flux.IntegratedFluxTransformer2DModel",
        "backend.nn.chroma.IntegratedChromaTransformer2DModel",
        "backend.nn.mmditx.MMDiTX",
        "backend.nn.vae.Encoder",
        "backend.nn.vae.Decoder",
    ),
)

REFORGE = ForgePackage(
    unet="ldm_patched.ldm.modules.diffusionmodules.openaimodel",
    transformer="ldm_patched.ldm.modules.attention",
    vae="ldm_patched.ldm.modules.diffusionmodules.model",
    layers=(
        "ldm_patched.modules.ops.disable_weight_init.",
        "ldm_patched.modules.ops.manual_cast.",
    ),
    casts="ldm_patched_cast_weights",
    ignored_attrs=frozenset(
        {
            "ldm_patched_cast_weights",
            "prev_ldm_patched_cast_weights",
            "ldm_patched_patched_weights",
            "weight_function",
            "bias_function",
            "optimized_attention",
        }
    ),
    dynamic_weight_attrs=("weight_function", "bias_function"),
    copies_on_own_stream=_uses_offload_streams,
    per_image=(
        "ldm_patched.ldm.modules.diffusionmodules.model.Encoder",
        "ldm_patched.ldm.modules.diffusionmodules.model.Decoder",
    ),
    weight_functions=(
        LowVramPatches(
            "ldm_patched.modules.model_patcher.LowVramPatch",
            "ldm_patched.modules.weight_adapter.lora.LoRAAdapter",
            {
                "ldm_patched.modules.lora": ("calculate_weight",),
                "ldm_patched.modules.model_management": COPY_HELPERS,
            },
        ),
    ),
)
