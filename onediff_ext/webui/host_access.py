"""What the WebUI's own command line says about who may do what."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from onediff_ext.panel.foreign_requests import ANY_NAME, machine_names, why_foreign


@dataclass(frozen=True)
class ApiAccess:
    """Who may use the API.

    Args:
        auth: The host's ``--api-auth``, ``user:password`` pairs with commas; None for none.
        names: Names of this server besides ``localhost`` and addresses in numbers.
        origins: Other sites that may use it, as the host's ``--cors-allow-origins`` says.
        origin_pattern: As its ``--cors-allow-origins-regex`` says; ``""`` for none.
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
            # A site that has pointed its name here has no password: browsers keep it by name.
            names.add(ANY_NAME)
        origins = str(getattr(flags, "cors_allow_origins", None) or "").split(",")
        return cls(
            auth,
            frozenset(names),
            tuple(origin.strip() for origin in origins if origin.strip()),
            str(getattr(flags, "cors_allow_origins_regex", None) or ""),
        )

    def why_refused(self, host: str | None, origin: str | None) -> str | None:
        """Why a request with these headers is another site's, or None when it is not."""
        if origin and self.origin_pattern and re.fullmatch(self.origin_pattern, origin):
            origin = None
        return why_foreign(host, origin, self.names, self.origins)


def why_no_import(flags: Any) -> str | None:
    """Why graphs cannot be imported in the panel: where extensions cannot be installed either.

    Both run code of a visitor's choice.
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
