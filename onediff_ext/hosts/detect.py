"""Which WebUI runs, and its adapter."""

from __future__ import annotations

from importlib.util import find_spec

from onediff_ext.hosts.base import WebUIHost


def host_name() -> str:
    """``"a1111"``, ``"forge"``, ``"reforge"`` or ``"neo"``, by what only one of them has."""
    if find_spec("modules_forge") is None:
        return "a1111"
    if find_spec("ldm_patched") is not None:
        return "reforge"
    from backend import attention

    # The attention of Neo's VAE; Forge's has another name.
    return "neo" if hasattr(attention, "attention_function_vae") else "forge"


def make_host() -> WebUIHost:
    """The adapter of the running WebUI."""
    name = host_name()
    if name == "a1111":
        from onediff_ext.hosts.a1111.host import A1111Host

        return A1111Host()
    if name == "neo":
        from onediff_ext.hosts.neo.host import NeoHost

        return NeoHost()
    if name == "forge":
        from onediff_ext.hosts.forge.host import ForgeHost

        return ForgeHost()
    from onediff_ext.hosts.forge.reforge import ReForgeHost

    return ReForgeHost()
