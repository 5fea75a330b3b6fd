"""Identifies the machine: the parts of a key that decide whether a stored graph fits."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import sys
from pathlib import Path

import torch

from onediff_ext.engine.blocks.key_text import digest


@functools.cache
def machine_entries(device_type: str, device_index: int) -> dict[str, str]:
    """Return the parts of a kind's key that the machine decides.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        device_index: Index of the GPU; ignored on a CPU.
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
        entries["device"] = f"cpu {torch.backends.cpu.get_cpu_capability()} {cpu_flags_digest()}"
    return entries


@functools.cache
def machine_digest(device: torch.device) -> str:
    """Return a digest of all that decides whether a graph loads here, and how long builds take.

    It covers more than the key. Driver and C library do not change a graph's bytes, yet a graph
    that loaded before may crash after one of them changed. It contains no host name: an equal
    machine, or the same container after a restart, is the same machine.

    Args:
        device: Where graphs run.

    Returns:
        16 hexadecimal digits.
    """
    described = {**machine_entries(device.type, device.index or 0), "libc": _libc()}
    if device.type == "cuda":
        described["driver"] = _driver_version()
    text = "\n".join(f"{name}={value}" for name, value in sorted(described.items()))
    return digest(text)


def _libc() -> str:
    """Return the C library's version, or the system's where none is named: on Windows, macOS."""
    try:
        named = " ".join(filter(None, platform.libc_ver()))
    except OSError:  # it looks for a name in Python's own program, which may be unreadable
        named = ""
    return named or platform.version()


def _driver_version() -> str:
    version = Path("/proc/driver/nvidia/version")
    if version.exists():
        return version.read_text(encoding="utf-8", errors="replace").splitlines()[0]
    return _driver_version_of_nvml() or "unknown"


def _driver_version_of_nvml() -> str | None:
    """Ask NVIDIA's management library, which comes with the driver.

    Windows and its Linux (WSL) have no file that tells.
    """
    try:
        nvml = ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        version = ctypes.create_string_buffer(80)
        error = nvml.nvmlSystemGetDriverVersion(version, ctypes.c_uint(len(version)))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no such library, or not NVIDIA's
        return None
    return None if error else version.value.decode(errors="replace")


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "absent"
    return str(triton.__version__)


@functools.cache
def cpu_flags_digest() -> str:
    """Return a digest of the CPU's instruction sets, 8 hexadecimal digits.

    Code for a CPU is built for exactly these.
    """
    cpuinfo = Path("/proc/cpuinfo")
    described = platform.processor()
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                described = " ".join(sorted(line.split(":", 1)[1].split()))
                break
    return hashlib.sha256(described.encode()).hexdigest()[:8]
