"""The WebUI's own command line and GPUs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import torch

from onediff_ext.panel.foreign_requests import ANY_NAME, foreign_reason, machine_names


@dataclass(frozen=True)
class ApiAccess:
    """The users who may use the API.

    Args:
        auth: The host's ``--api-auth``, ``user:password`` pairs with commas; None without it.
        names: Names of this server besides ``localhost`` and numeric addresses.
        origins: Other sites that may use the API, from the host's ``--cors-allow-origins``.
        origin_pattern: From ``--cors-allow-origins-regex``; ``""`` without it.
    """

    auth: str | None = None
    names: frozenset[str] = frozenset()
    origins: tuple[str, ...] = ()
    origin_pattern: str = ""

    @classmethod
    def of(cls, flags: Any) -> ApiAccess:
        """Read the host's ``cmd_opts``."""
        auth = getattr(flags, "api_auth", None)
        names = {str(getattr(flags, "server_name", None) or "")} - {""}
        if any(getattr(flags, name, None) for name in ("listen", "server_name")):
            names |= machine_names()
        if auth:
            # Browsers keep passwords by name, so a site that points its name here has none.
            names.add(ANY_NAME)
        origins = str(getattr(flags, "cors_allow_origins", None) or "").split(",")
        return cls(
            auth,
            frozenset(names),
            tuple(origin.strip() for origin in origins if origin.strip()),
            str(getattr(flags, "cors_allow_origins_regex", None) or ""),
        )

    def refusal_reason(self, host: str | None, origin: str | None) -> str | None:
        """Why a request with these headers comes from another site; None when it does not."""
        if origin and self.origin_pattern and re.fullmatch(self.origin_pattern, origin):
            origin = None
        return foreign_reason(host, origin, self.names, self.origins)


def no_import_reason(flags: Any) -> str | None:
    """Why the panel cannot import graphs; None when it can.

    The host's rule for installing extensions applies: both run code that a visitor chooses.
    """
    if not getattr(flags, "disable_extension_access", False):
        return None
    return (
        "Import is off because others can reach this WebUI; use `onediff-ext graphs import`, or"
        " start the WebUI with --enable-insecure-extension-access."
    )


def hides_folders(flags: Any) -> bool:
    """Whether the host was started with ``--hide-ui-dir-config``."""
    return bool(getattr(flags, "hide_ui_dir_config", False))


def further_gpus(count: int) -> list[tuple[str, str | None]]:
    """Return the names of other GPUs of this machine, and what selects each for a process.

    Args:
        count: How many, at most.

    Returns:
        (name, value of ``CUDA_VISIBLE_DEVICES``); None on a machine without a GPU.
    """
    if not torch.cuda.is_available():
        return [(f"process {number + 2}", None) for number in range(count)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    names = names or [str(number) for number in range(torch.cuda.device_count())]
    own = host_device().index or 0
    others = [name for number, name in enumerate(names) if number != own]
    return [(f"GPU {name}", name) for name in others[:count]]


def host_device() -> torch.device:
    """Return the device that the host draws on."""
    from modules import devices

    return torch.device(devices.device)
