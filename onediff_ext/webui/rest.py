"""REST under ``/onediff/v1``: what the panel shows and does, for other programs.

Takes names from the store, never paths, and imports no graphs: these are native code.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.security import HTTPBasic, HTTPBasicCredentials

from onediff_ext import __version__
from onediff_ext.core.errors import OneDiffError
from onediff_ext.ui.choices import Choices, from_arguments
from onediff_ext.ui.graph_rows import graph_groups
from onediff_ext.webui.port import WebUIPort

PREFIX = "/onediff/v1"


def add_routes(app: FastAPI, port: WebUIPort, api_auth: str | None, host: str) -> None:
    """Add the routes to the host's server; those of before are replaced.

    Args:
        app: The host's server.
        port: Does what is asked.
        api_auth: The host's ``--api-auth``, ``user:password`` pairs with commas; None for none.
        host: The WebUI's name.
    """
    remove_routes(app)
    guards = [Depends(_guard(api_auth))] if api_auth else []

    def version() -> dict[str, Any]:
        return {"version": __version__, "host": host}

    def schema() -> dict[str, Any]:
        return dict(port.schema())

    def status() -> dict[str, Any]:
        return port.status().as_json()

    def graphs() -> dict[str, Any]:
        return {
            "checkpoints": [
                group.as_json() for group in graph_groups(port.library(), port.machine())
            ]
        }

    async def warm_up(request: Request) -> dict[str, Any]:
        try:
            body = await request.json()
        except ValueError:
            body = {}
        if not isinstance(body, Mapping):
            raise HTTPException(422, "The body must be a JSON object.")
        if isinstance(body.get("sizes"), list):
            body = {**body, "sizes": ", ".join(map(str, body["sizes"]))}
        try:
            choices = Choices.parse(from_arguments([body]))
            port.start_warm_up(choices)
        except OneDiffError as exc:
            raise HTTPException(422, str(exc)) from exc
        return {"started": True, "sizes": choices.sizes}

    def cancel() -> dict[str, Any]:
        port.cancel()
        return port.status().as_json()

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
