"""A large GPU plays a small one: ``python -m benchmarks.limited_memory 8 PROGRAM.py [ARGUMENT …]``.

torch's allocator refuses memory above the limit, and what asks for free or total memory is told the
limit's. What another process takes does not count, so a build worker is charged to nobody.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.run_program import run_program

# What a CUDA context and its libraries take beside torch's own memory.
CONTEXT_BYTES = 2**29


def main() -> None:
    """Run a program as Python itself would, with this GPU limited. Without a GPU nothing is."""
    if torch.cuda.is_available():
        limit_memory(float(sys.argv[1]))
    run_program(sys.argv[2:])


def limit_memory(gigabytes: float) -> None:
    """Make torch and everybody who asks it believe in a smaller GPU, in this process.

    Args:
        gigabytes: Of 2**30 bytes; the memory of the CUDA context counts.
    """
    real_info, real_properties = torch.cuda.mem_get_info, torch.cuda.get_device_properties
    limit = int(gigabytes * 2**30)
    total = real_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, (limit - CONTEXT_BYTES) / total))

    class Properties:
        """The device's, with less memory."""

        def __init__(self, own: Any) -> None:
            self._own, self.total_memory = own, limit

        def __getattr__(self, name: str) -> Any:
            return getattr(self._own, name)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        taken = torch.cuda.memory_reserved(device) + CONTEXT_BYTES
        return max(0, min(real_info(device)[0], limit - taken)), limit

    def get_device_properties(device: Any = None) -> Any:
        return Properties(real_properties(device))

    torch.cuda.mem_get_info = mem_get_info
    torch.cuda.get_device_properties = get_device_properties


if __name__ == "__main__":
    main()
