"""What of this machine decides whether a graph that was built elsewhere or earlier fits."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from pathlib import Path

import torch


@functools.cache
def machine_entries(device_type: str, device_index: int) -> dict[str, str]:
    """Named parts of a kind's key that come from the machine.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        device_index: Which of several GPUs; ignored on a CPU.
    """
    entries = {
        "torch": torch.__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "platform": f"{platform.system()} {platform.machine()}",
    }
    if device_type == "cuda":
        properties = torch.cuda.get_device_properties(device_index)
        entries["device"] = f"{properties.name} sm_{properties.major}{properties.minor}"
        entries["cuda"] = torch.version.cuda or torch.version.hip or "unknown"
        entries["triton"] = _triton_version()
    else:
        entries["device"] = f"cpu {torch.backends.cpu.get_cpu_capability()} {_cpu_flags_digest()}"
    return entries


@functools.cache
def machine_digest(device: torch.device) -> str:
    """Short digest of everything here that decides whether a graph loads, and how long it builds.

    Wider than the key: driver, C library and compiler do not change a graph's bytes,
    yet a graph that loaded before may crash after one of them changed. No host name:
    an equal machine, or the same container started again, is the same machine.
    """
    described = {**machine_entries(device.type, device.index or 0), "libc": _libc()}
    if device.type == "cuda":
        described["driver"] = _driver_version()
    text = "\n".join(f"{name}={value}" for name, value in sorted(described.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _libc() -> str:
    return " ".join(platform.libc_ver()) or platform.version()


def _driver_version() -> str:
    version = Path("/proc/driver/nvidia/version")
    if version.exists():
        return version.read_text(errors="replace").splitlines()[0]
    return "unknown"


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "absent"
    return str(triton.__version__)


def _cpu_flags_digest() -> str:
    """Short digest of the CPU's instruction sets, since graphs are built for exactly these."""
    cpuinfo = Path("/proc/cpuinfo")
    described = platform.processor()
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                described = " ".join(sorted(line.split(":", 1)[1].split()))
                break
    return hashlib.sha256(described.encode()).hexdigest()[:8]
