"""How many workers may build at the same time."""

from __future__ import annotations

import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.core.priority import usable_cores

# A worker's CUDA context, its kernels and its trial run. Small GPUs have room for few of them.
_WORKER_GPU_BYTES = 2**30


def worker_count(options: CompileOptions) -> int:
    """Workers at the same time while no picture is drawn: the user's number, else half the cores
    (2 to 8)."""
    return options.workers or min(8, max(2, usable_cores() // 2))


def workers_beside_foreground(
    options: CompileOptions, device: torch.device, *, is_drawing: bool, running: int = 0
) -> int:
    """Workers at the same time beside a picture that may need the same cores and memory.

    Args:
        options: The user's number of workers.
        device: The device that the graphs are for.
        is_drawing: Whether a picture is being drawn.
        running: Workers that have their GPU memory already.

    Returns:
        On a GPU, free memory limits the number: 0 beside a picture that leaves no room for a
        worker, whose build waits then. On a CPU the picture does. Otherwise at least 1.
    """
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        fitting = running + free_bytes // _WORKER_GPU_BYTES
        return max(0 if is_drawing else 1, min(worker_count(options), fitting))
    return 1 if is_drawing and not options.workers else worker_count(options)


def has_room_to_measure(device: torch.device) -> bool:
    """Whether a worker has room for a block's weights and inputs as pictures have them."""
    if device.type != "cuda":
        return True
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes >= 4 * _WORKER_GPU_BYTES


def workers_after_exit(device: torch.device) -> int:
    """Workers that may finish their graphs after the end of the process that started them.

    The next process may need the GPU's memory, so they take a tenth of it at most.
    """
    if device.type == "cuda":
        _, total_bytes = torch.cuda.mem_get_info(device)
        return total_bytes // (10 * _WORKER_GPU_BYTES)
    return usable_cores()
