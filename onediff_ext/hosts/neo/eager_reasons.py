"""Why a job of Neo runs eager: in one line, with what to change to be faster."""

from __future__ import annotations

from typing import Any

# Attributes that "Torch Compile Integrated" leaves on the host's model, in its versions.
_OWN_COMPILE = ("_torch_compile_config", "_compile_config", "_compiled_backup")
_PLAIN_LAYERS = "ForgeOperations"
_IN_FP16 = "choose a checkpoint in fp16 or bf16"
# The host's names of layers that compute with quantized weights.
_LAYERS = {
    "ForgeOperationsFP8": "layers compute in fp8: start Neo without --fast-fp8",
    "ForgeOperationsGGUF": f"weights are stored as gguf: {_IN_FP16}",
    "ForgeOperationsBNB4bits": f"weights are stored in 4 bits: {_IN_FP16}",
}


def eager_reason(model: Any, dynamic_args: Any) -> str | None:
    """Why jobs with this model run eager, or None.

    Args:
        model: Neo's ``KModel``, which holds the UNet or transformer.
        dynamic_args: Neo's ``backend.args.dynamic_args``, which describes the loaded checkpoint.
    """
    network = model.diffusion_model
    if any(getattr(model, name, None) is not None for name in _OWN_COMPILE) or hasattr(
        network, "_orig_mod"
    ):
        return "Neo's own Torch Compile is on: set its preset to Disable"
    if getattr(dynamic_args, "nunchaku", False):
        return f"weights are stored in nunchaku's 4 bits: {_IN_FP16}"
    layers = getattr(dynamic_args, "ops", None)
    if layers not in (None, _PLAIN_LAYERS):
        return _LAYERS.get(layers, f"layers are quantized ({layers}): {_IN_FP16}")
    return None
