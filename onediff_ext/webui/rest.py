"""REST under ``/onediff/v1``: what the panel shows and does, for other programs.

Takes names from the store, never paths, and imports no graphs: these are native code. Requests
that other web sites send through a visitor's browser are refused.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import Response
from fastapi.security import HTTPBasic, HTTPBasicCredentials

from onediff_ext import __version__
from onediff_ext.core.errors import OneDiffError
from onediff_ext.panel.choices import Choices, from_arguments, is_nested
from onediff_ext.panel.fields import BY_NAME
from onediff_ext.panel.graph_rows import graph_groups
from onediff_ext.webui.host_access import ApiAccess
from onediff_ext.webui.request_body import read_body, read_no_body, refuse
from onediff_ext.webui.webui_panel_host import WebUIPanelHost

PREFIX = "/onediff/v1"


def add_routes(app: FastAPI, port: WebUIPanelHost, access: ApiAccess, host: str) -> None:
    """Add the routes to the host's server; those of before are replaced.

    Args:
        app: The host's server.
        port: Does what is asked.
        access: Who may ask.
        host: The WebUI's name.
    """
    remove_routes(app)
    guards = [Depends(_refuse_foreign(access))]
    if access.auth:
        guards.append(Depends(_guard(access.auth)))

    def version() -> Response:
        return _answer(lambda: {"version": __version__, "host": host})

    def schema() -> Response:
        return _answer(port.schema)

    def status() -> Response:
        return _answer(lambda: port.status().as_json())

    def graphs() -> Response:
        def groups() -> object:
            found = graph_groups(port.library(), port.machine())
            return {"checkpoints": [group.as_json() for group in found]}

        return _answer(groups)

    async def warm_up(request: Request) -> Response:
        body = await read_body(request, tuple(BY_NAME))
        sizes = body.get("sizes")
        if isinstance(sizes, list) and not is_nested(sizes):
            body["sizes"] = ", ".join(map(str, sizes))
        try:
            choices = Choices.parse(from_arguments([body]))
            port.start_warm_up(choices)
        except OneDiffError as exc:
            refuse(422, str(exc))
        return _json({"started": True, "sizes": choices.sizes}, 202)

    async def cancel(request: Request) -> Response:
        await read_no_body(request)
        port.cancel()
        return _answer(lambda: port.status().as_json())

    for method, name, endpoint, status_code in (
        ("GET", "version", version, 200),
        ("GET", "schema", schema, 200),
        ("GET", "status", status, 200),
        ("GET", "graphs", graphs, 200),
        ("POST", "warmup", warm_up, 202),
        ("POST", "cancel", cancel, 200),
    ):
        app.add_api_route(
            f"{PREFIX}/{name}",
            endpoint,
            methods=[method],
            status_code=status_code,
            dependencies=guards,
            tags=["onediff"],
        )


def remove_routes(app: FastAPI) -> None:
    """Take the routes out again."""
    app.router.routes[:] = [
        route
        for route in app.router.routes
        if not str(getattr(route, "path", "")).startswith(f"{PREFIX}/")
    ]


def _answer(make: Callable[[], object]) -> Response:
    """Answer with what a function makes; an error of ours is 503 with its message."""
    try:
        return _json(make())
    except OneDiffError as exc:
        refuse(503, str(exc))


def _json(value: object, status_code: int = 200) -> Response:
    """Plain values as JSON in ASCII: a label from a file may have characters that UTF-8 lacks."""
    text = json.dumps(_finite(value))
    return Response(text, status_code=status_code, media_type="application/json")


def _finite(value: object) -> object:
    """The same values; null for numbers that JSON lacks."""
    if isinstance(value, dict):
        return {str(name): _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refuse_foreign(access: ApiAccess) -> Any:
    async def check(request: Request) -> None:
        headers = request.headers
        reason = access.why_refused(headers.get("host"), headers.get("origin"))
        if reason is not None:
            refuse(403, reason)

    return check


def _guard(api_auth: str) -> Any:
    users = dict(pair.split(":", 1) for pair in api_auth.split(",") if ":" in pair)
    users = {name.strip(): password for name, password in users.items()}

    def check(credentials: HTTPBasicCredentials = Depends(HTTPBasic())) -> None:  # noqa: B008
        expected = users.get(credentials.username)
        given = credentials.password.encode("utf-8")
        if expected is None or not secrets.compare_digest(given, expected.encode("utf-8")):
            raise HTTPException(
                401, "Incorrect username or password", headers={"WWW-Authenticate": "Basic"}
            )

    return check
