"""Which WebUI this is."""

from __future__ import annotations

from importlib.util import find_spec

from onediff_ext.core.errors import OptionError
from onediff_ext.hosts.webui import WebUIHost


def host_name() -> str:
    """``"a1111"``, ``"forge"`` or ``"reforge"``, by the packages that only one of them has."""
    if find_spec("modules_forge") is None:
        return "a1111"
    return "forge" if find_spec("backend") is not None else "reforge"


def make_host() -> WebUIHost:
    """The adapter of the running WebUI.

    Raises:
        OptionError: There is none for it.
    """
    name = host_name()
    if name == "a1111":
        from onediff_ext.hosts.a1111.host import A1111Host

        return A1111Host()
    raise OptionError(f"OneDiff has no adapter for {name} yet.", "Use AUTOMATIC1111.")
