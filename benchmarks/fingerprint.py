"""What a measured figure was measured on."""

from __future__ import annotations

import datetime
import platform
from typing import Any

import torch

from onediff_ext.core.priority import usable_cores
from onediff_ext.hosts.diffusers.jobs.run_report import versions


def fingerprint(device: torch.device) -> dict[str, Any]:
    """Machine, versions and day, as they go into every result file."""
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": usable_cores(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "gpu_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    else:
        found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    return found
