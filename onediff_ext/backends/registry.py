"""Backends by name."""

from __future__ import annotations

import torch

from onediff_ext.core.errors import OptionError
from onediff_ext.core.options import BACKENDS, CompileOptions
from onediff_ext.engine.backend_port import Backend


def make_backend(name: str) -> Backend:
    """Return the backend of this name.

    Raises:
        OptionError: There is none of this name.
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


def why_no_graphs(device: torch.device) -> str | None:
    """What the usual backend lacks on a device, with what mends it; None when it can work."""
    return make_backend(CompileOptions.backend).unavailable_reason(device)


def choose_backend(name: str) -> tuple[Backend, str | None]:
    """The backend of this name, or the usual one where it cannot work.

    Returns:
        (backend, why it is not the one of this name). A backend that cannot work is
        returned where the usual one cannot either; its blocks then run eager, with the reason.

    Raises:
        OptionError: There is none of this name.
    """
    backend = make_backend(name)
    usual = CompileOptions.backend
    if name == usual:
        return backend, None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = backend.unavailable_reason(device)
    if reason is None:
        return backend, None
    substitute = make_backend(usual)
    if substitute.unavailable_reason(device) is not None:
        return backend, None
    return substitute, f"{reason}; {usual} builds the graphs"
