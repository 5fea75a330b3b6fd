"""Whether OneFlow can work here; checked without importing it where possible."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import sys

import torch

from onediff_ext.backends.oneflow.launch_order import order_launches
from onediff_ext.core.words import first_line

INSTALL = 'pip install "onediff-ext[oneflow]", see docs/oneflow.md'
TESTED = "0.9.0"
PYTHON = (3, 10)
# Compute capabilities with code in the wheel. It has no PTX for other GPUs, but code for 8.6
# also runs on 8.9.
CODE_FOR = ((6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6))
_LIBRARIES = {
    "libcublas.so.11": "nvidia-cublas-cu11==11.10.3.66",
    "libcublasLt.so.11": "nvidia-cublas-cu11==11.10.3.66",
    "libcudnn": "nvidia-cudnn-cu11==8.5.0.96",
}


def unavailable_reason(device: torch.device) -> str | None:
    """Return in one line why OneFlow cannot work on this device; None when it can."""
    reason = process_reason()
    if reason is not None or device.type == "cpu":
        return reason
    if device.type != "cuda" or torch.version.hip is not None:
        return "OneFlow has code for CPUs and NVIDIA GPUs only"
    return capability_reason(torch.cuda.get_device_capability(device)) or _no_cuda_reason()


@functools.cache
def process_reason() -> str | None:
    """Return why OneFlow cannot work in this process at all, or None; checked once."""
    found = sys.version_info[:2]
    if found != PYTHON:
        return f"OneFlow {TESTED} needs Python 3.10; this is {found[0]}.{found[1]}"
    if importlib.util.find_spec("oneflow") is None:
        return f"OneFlow is not installed ({INSTALL})"
    # With a wrong version of these packages, importing OneFlow does not fail cleanly.
    return (
        version_reason("oneflow", TESTED)
        or version_reason("numpy", "1")
        or version_reason("protobuf", "3.20")
        or _import_reason()
    )


def version_reason(package: str, wanted: str) -> str | None:
    """Return why a package's version does not match; it must start with `wanted`."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"OneFlow needs {package} {wanted}, which is not installed ({INSTALL})"
    if not f"{version}.".replace("+", ".").startswith(f"{wanted}."):
        return f"OneFlow needs {package} {wanted}; {version} is installed ({INSTALL})"
    return None


def capability_reason(capability: tuple[int, int]) -> str | None:
    """Return why the wheel has no code for a GPU of this compute capability, or None."""
    major, minor = capability
    if any(major == m and minor >= n for m, n in CODE_FOR):
        return None
    known = ", ".join(f"{m}.{n}" for m, n in CODE_FOR)
    return f"OneFlow {TESTED} has no code for GPUs of capability {major}.{minor}, only {known}"


def import_error_reason(exc: BaseException) -> str:
    """Why importing OneFlow failed, and which package helps."""
    first = first_line(str(exc), type(exc).__name__)
    for library, package in _LIBRARIES.items():
        if library in first:
            name = first.split(":")[0]
            return f"OneFlow needs the library {name} (pip install --no-deps {package})"
    return f"OneFlow cannot be imported ({type(exc).__name__}: {first[:150]})"


def _import_reason() -> str | None:
    os.environ.setdefault("GLOG_minloglevel", "3")  # no warnings about missing GPUs
    try:
        import oneflow  # noqa: F401
    except Exception as exc:  # a foreign package's import may raise anything
        return import_error_reason(exc)
    return order_launches()


def _no_cuda_reason() -> str | None:
    import oneflow

    return None if oneflow.cuda.is_available() else "OneFlow finds no CUDA driver that it can use"
