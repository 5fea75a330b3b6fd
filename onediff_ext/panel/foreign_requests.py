"""Requests that another web site sends through a visitor's browser, and how they are told apart.

A site may point its own name at this machine (DNS rebinding): then the ``Host`` header has that
site's name. Or it may send a form or a script's request to this machine's address (CSRF): then the
``Origin`` header has another address than ``Host``.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any, TypeAlias

_Scope: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App: TypeAlias = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

ANY_NAME = "*"
"""In a list of names: every ``Host`` is accepted."""


def is_loopback(address: str) -> bool:
    """Whether only this machine's own users reach a server at this address."""
    name = address.strip().lower().strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def machine_names() -> frozenset[str]:
    """The names under which people in the same network reach this machine."""
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0], f"{name.partition('.')[0]}.local"} - {""})


def why_foreign(
    host: str | None,
    origin: str | None,
    names: Collection[str],
    origins: Collection[str] = (),
) -> str | None:
    """Why a request is another site's, or None when it is not.

    An address in numbers and ``localhost`` are always accepted as ``Host``: another site's name
    is neither.

    Args:
        host, origin: The headers; None where the request has none.
        names: Further names of this server; `ANY_NAME` for all.
        origins: Other sites' origins that the user allows, such as ``https://example.org``.
    """
    host = (host or "").strip().lower()
    name = _name_of(host)
    if ANY_NAME not in names and not _is_ours(name, names):
        return f"The Host header names {_shown(name)}, which is no known name of this server."
    if origin is None:
        return None
    origin = origin.strip().lower()
    if origin in {allowed.strip().lower().rstrip("/") for allowed in origins}:
        return None
    if not host or origin.partition("://")[2] != host:
        return f"The request comes from another site ({_shown(origin)})."
    return None


class RefuseForeign:
    """ASGI middleware: other sites' requests get 403 and go no further.

    Args:
        app: The server.
        names: As `why_foreign` takes them.
        hint: What the user does next, if it was no other site.
    """

    def __init__(self, app: _App, names: Collection[str], hint: str = "") -> None:
        self._app, self._names, self._hint = app, names, hint

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        reason = why_foreign(headers.get(b"host"), headers.get(b"origin"), self._names)
        if reason is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            kind = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 403, "headers": kind})
            await send({"type": "http.response.body", "body": f"{reason} {self._hint}".encode()})


def _name_of(host: str) -> str:
    """The header without its port, and without an IPv6 address's brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _is_ours(name: str, names: Collection[str]) -> bool:
    if name == "localhost" or name in {one.strip().lower() for one in names}:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _shown(text: str) -> str:
    return repr(text[:80])
