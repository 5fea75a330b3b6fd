"""The REST routes under ``/onediff/v1``: what is there, what is drawn with, and warm-ups.

The routes accept names from the store and no paths. They import no graphs, which are native code.
Requests that other web sites send through a visitor's browser are refused.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from fastapi.security import HTTPBasic, HTTPBasicCredentials

from onediff_ext import __version__
from onediff_ext.core.errors import OneDiffError
from onediff_ext.panel.choices import Choices, from_arguments
from onediff_ext.panel.fields import BY_NAME
from onediff_ext.panel.graph_rows import graph_groups
from onediff_ext.webui.host_access import ApiAccess
from onediff_ext.webui.request_body import read_body, read_no_body, refuse
from onediff_ext.webui.webui_panel_host import WebUIPanelHost

PREFIX = "/onediff/v1"


def add_routes(app: FastAPI, panel_host: WebUIPanelHost, access: ApiAccess, host: str) -> None:
    """Add the routes to the host's server; routes of an earlier call are replaced.

    Args:
        app: The host's server.
        panel_host: Answers the requests.
        access: Who may use the API.
        host: The WebUI's name.
    """
    remove_routes(app)
    guards = [Depends(_refuse_foreign(access))]
    if access.auth:
        guards.append(Depends(_require_password(access.auth)))

    def version() -> Response:
        return _answer(lambda: {"version": __version__, "host": host})

    def schema() -> Response:
        return _answer(panel_host.schema)

    def status() -> Response:
        return _status(panel_host)

    def graphs() -> Response:
        def groups() -> object:
            found = graph_groups(panel_host.library(), panel_host.machine())
            return {"checkpoints": [group.as_json() for group in found]}

        return _answer(groups)

    async def warm_up(request: Request) -> Response:
        body = await read_body(request, tuple(BY_NAME))
        try:
            choices = Choices.parse(from_arguments([body]))
            panel_host.start_warm_up(choices)
        except OneDiffError as exc:
            refuse(422, str(exc))
        return _json({"started": True, "sizes": choices.sizes}, 202)

    def control(do: Callable[[], None]) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            await read_no_body(request)
            await run_in_threadpool(do)  # it waits for workers to end
            return _status(panel_host)

        return route

    for method, name, endpoint, status_code in (
        ("GET", "version", version, 200),
        ("GET", "schema", schema, 200),
        ("GET", "status", status, 200),
        ("GET", "graphs", graphs, 200),
        ("POST", "warmup", warm_up, 202),
        ("POST", "cancel", control(panel_host.cancel), 200),
        ("POST", "pause", control(panel_host.pause), 200),
        ("POST", "resume", control(panel_host.go_on), 200),
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
    """Remove the routes from the server."""
    app.router.routes[:] = [
        route
        for route in app.router.routes
        if not str(getattr(route, "path", "")).startswith(f"{PREFIX}/")
    ]


def _status(panel_host: WebUIPanelHost) -> Response:
    def status() -> dict[str, object]:
        return {**panel_host.status().as_json(), "warm_up": panel_host.warm_up_state()}

    return _answer(status)


def _answer(make: Callable[[], object]) -> Response:
    """Answer with the function's result; a OneDiffError becomes a 503 with its message."""
    try:
        return _json(make())
    except OneDiffError as exc:
        refuse(503, str(exc))


def _json(value: object, status_code: int = 200) -> Response:
    """Plain values as ASCII JSON: labels from files may have characters that UTF-8 lacks."""
    text = json.dumps(_finite(value))
    return Response(text, status_code=status_code, media_type="application/json")


def _finite(value: object) -> object:
    """The same values, with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {str(name): _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refuse_foreign(access: ApiAccess) -> Any:
    async def check(request: Request) -> None:
        headers = request.headers
        reason = access.refusal_reason(headers.get("host"), headers.get("origin"))
        if reason is not None:
            refuse(403, reason)

    return check


def _require_password(api_auth: str) -> Any:
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
