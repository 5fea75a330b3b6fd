"""The adapter for a UNet."""

from __future__ import annotations

from typing import Any

from onediff_ext.engine.deepcache.unet_adapter import UNetAdapter
from onediff_ext.hosts.diffusers.deepcache_unet import DiffusersUNet
from onediff_ext.hosts.ldm_deepcache_unet import LdmUNet, is_ldm_unet


def adapter_for(unet: Any) -> UNetAdapter:
    """The adapter that knows a UNet's class.

    Raises:
        OptionError: None does.
    """
    return LdmUNet(unet) if is_ldm_unet(unet) else DiffusersUNet(unet)
