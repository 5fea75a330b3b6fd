"""Backends by name."""

from __future__ import annotations

from onediff_ext.core.errors import OptionError
from onediff_ext.core.options import BACKENDS
from onediff_ext.engine.port import Backend


def make_backend(name: str) -> Backend:
    """Return the backend of this name.

    Raises:
        OptionError: There is none of this name.
    """
    if name == "eager":
        from onediff_ext.backends.eager import EagerBackend

        return EagerBackend()
    if name == "inductor":
        from onediff_ext.backends.inductor import InductorBackend

        return InductorBackend()
    if name == "oneflow":
        from onediff_ext.backends.oneflow.backend import OneFlowBackend

        return OneFlowBackend()
    raise OptionError(f"There is no backend {name!r}.", f"Known: {', '.join(BACKENDS)}.")
