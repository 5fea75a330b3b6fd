"""Where Neo keeps its blocks and layers: Forge's places, with layers of another form."""

from __future__ import annotations

from onediff_ext.hosts.forge_blocks import ForgePackage, uses_backend_stream
from onediff_ext.hosts.forge_weight_functions import COPY_HELPERS, LowVramPatches

NEO = ForgePackage(
    unet="backend.nn.unet",
    transformer="backend.nn.unet",
    vae="backend.nn.vae",
    layers=("backend.operations.ForgeOperations.",),
    casts="parameters_manual_cast",
    ignored_attrs=frozenset(
        {
            "parameters_manual_cast",
            "prev_parameters_manual_cast",
            "forge_force_cast_weights",
            "forge_patched_weights",
            "weight_function",
            "bias_function",
        }
    ),
    # Where Neo offloads, it merges a LoRA at each call into the layers that it streams.
    dynamic_weight_attrs=("weight_function", "bias_function"),
    copies_on_own_stream=uses_backend_stream,
    per_image=(
        "backend.nn.unet.IntegratedUNet2DConditionModel",
        "backend.nn.flux.IntegratedFluxTransformer2DModel",
        "backend.nn.chroma.IntegratedChromaTransformer2DModel",
        "backend.nn.lumina.NextDiT",
        "backend.nn.vae.Encoder",
        "backend.nn.vae.Decoder",
    ),
    weight_functions=(
        LowVramPatches(
            "backend.patcher.base.LowVramPatch",
            "modules_forge.packages.comfy.weight_adapter.lora.LoRAAdapter",
            {
                "backend.patcher.base": ("merge_lora_to_weight",),
                "backend.memory_management": COPY_HELPERS,
            },
        ),
    ),
)
