"""Backends by name."""

from __future__ import annotations

import torch

from onediff_ext.core.errors import OptionError
from onediff_ext.core.options import BACKENDS, CompileOptions
from onediff_ext.engine.backend_port import Backend


def make_backend(name: str) -> Backend:
    """Return the backend of this name.

    Raises:
        OptionError: The name is unknown.
    """
    if name == "eager":
        from onediff_ext.backends.eager import EagerBackend

        return EagerBackend()
    if name == "inductor":
        from onediff_ext.backends.inductor.backend import InductorBackend

        return InductorBackend()
    if name == "oneflow":
        from onediff_ext.backends.oneflow.backend import OneFlowBackend

        return OneFlowBackend()
    raise OptionError(f"There is no backend {name!r}.", f"Known: {', '.join(BACKENDS)}.")


def no_graphs_reason(device: torch.device) -> str | None:
    """Return what the default backend lacks on a device and how to fix it; None when it works."""
    return make_backend(CompileOptions.backend).unavailable_reason(device)


def drawing_device() -> torch.device:
    """Return the device that pictures are drawn on by default."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_backend(name: str) -> tuple[Backend, str | None]:
    """Return the backend of this name, or the default backend if that one is unavailable.

    Returns:
        (backend, reason for the substitution or None). If the default backend is unavailable
        too, the named backend is returned; its blocks run eager and show the reason.

    Raises:
        OptionError: The name is unknown.
    """
    backend = make_backend(name)
    usual = CompileOptions.backend
    if name == usual:
        return backend, None
    device = drawing_device()
    reason = backend.unavailable_reason(device)
    if reason is None:
        return backend, None
    substitute = make_backend(usual)
    if substitute.unavailable_reason(device) is not None:
        return backend, None
    return substitute, f"{reason}; {usual} builds the graphs"
