"""What fits into a GPU's memory, and which option of a host makes it fit."""

from __future__ import annotations

GB = 10**9

# CUDA graphs may take this part of a GPU's memory.
CUDA_GRAPHS_PART = 4

# Least memory in bytes, less what a driver keeps for itself → advice. In 16 bits SDXL's weights
# take 6.9 GB, of which 5.1 are the UNet's, and SD1.5's take 2.1. An SDXL picture of 1024x1024 needs
# 1.3 GB beside the UNet.
_ADVICE = (
    (22 * GB, "SD1.5 and SDXL fit whole, Flux.1 with fewer bits or offloading"),
    (11 * GB, "SD1.5 and SDXL fit whole"),
    (7 * GB, "SD1.5 fits whole; SDXL fits with --medvram-sdxl in A1111, with Forge's and Neo's own "
     "memory management, and with enable_model_cpu_offload() in diffusers"),
    (5 * GB, "SD1.5 fits whole; SDXL needs Forge or Neo, which keep a part of it in main memory"),
    (3 * GB, "SD1.5 fits with --medvram in A1111, and whole in Forge and Neo; SDXL needs Forge or "
     "Neo, which keep a part of it in main memory"),
)  # fmt: skip
_SMALL_BYTES = 11 * GB  # below it, SDXL does not fit whole
_LEAST = "SD1.5 needs --lowvram in A1111, or Forge or Neo"


def memory_advice(total_bytes: int) -> str:
    """Return one line of advice for a GPU.

    Args:
        total_bytes: Its memory.
    """
    advice = next((text for least, text in _ADVICE if total_bytes >= least), _LEAST)
    gigabytes, most = total_bytes / 2**30, total_bytes / CUDA_GRAPHS_PART / 2**30
    return (
        f"{gigabytes:.0f} GB of GPU memory: {advice}. "
        f"CUDA graphs take up to {most:.1f} GB of what is free."
    )


def small_gpu_advice(total_bytes: int) -> str | None:
    """Return the line of advice for a GPU that SDXL does not fit into whole; None for others."""
    return memory_advice(total_bytes) if total_bytes < _SMALL_BYTES else None
