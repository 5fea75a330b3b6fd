"""REST under /onediff/v1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from onediff_ext.ui.fields import fields_for
from onediff_ext.webui.settings import HOST_FEATURES

FIELDS = fields_for(HOST_FEATURES)


@pytest.fixture
def client(host: SimpleNamespace) -> Any:
    return make_client(host, None)


def make_client(host: SimpleNamespace, api_auth: str | None) -> Any:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from onediff_ext.webui.port import WebUIPort
    from onediff_ext.webui.rest import add_routes

    app = FastAPI()
    port = WebUIPort(lambda: host.extension)
    add_routes(app, port, api_auth, "stand-in")
    add_routes(app, port, api_auth, "stand-in")  # "Reload UI"
    return TestClient(app)


def test_version_schema_status_graphs(client: Any) -> None:
    assert client.get("/onediff/v1/version").json()["host"] == "stand-in"
    names = [one["name"] for one in client.get("/onediff/v1/schema").json()["fields"]]
    assert names == [field.name for field in FIELDS]
    status = client.get("/onediff/v1/status").json()
    assert (status["running"], status["line"]) == ("off", "off")
    assert client.get("/onediff/v1/graphs").json() == {"checkpoints": []}


def test_routes_are_there_once(client: Any) -> None:
    paths = [route.path for route in client.app.routes if hasattr(route, "path")]
    ours = [path for path in paths if path.startswith("/onediff/")]
    assert len(ours) == len(set(ours)) == 6


def test_warm_up_draws_each_size(client: Any, host: SimpleNamespace) -> None:
    answer = client.post("/onediff/v1/warmup", json={"sizes": ["512x768", "64x64@2"]})
    assert answer.status_code == 202
    assert answer.json() == {"started": True, "sizes": "512x768, 64x64@2"}
    assert client.post("/onediff/v1/cancel").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"sizes": "/etc/passwd"},
        {"sizes": "512x768", "preset": "unheard"},
        {"sizes": "512x768", "enabled": False},
        {},
        [],
    ],
)
def test_what_cannot_be_warmed_up_is_refused(client: Any, body: Any, host: Any) -> None:
    answer = client.post("/onediff/v1/warmup", json=body)
    assert answer.status_code == 422
    assert host.adapter.steps == []


def test_all_routes_ask_for_the_hosts_credentials(host: SimpleNamespace) -> None:
    client = make_client(host, "someone:secret,other:more:colons")
    for method, path in (
        ("GET", "version"),
        ("GET", "schema"),
        ("GET", "status"),
        ("GET", "graphs"),
        ("POST", "warmup"),
        ("POST", "cancel"),
    ):
        url = f"/onediff/v1/{path}"
        assert client.request(method, url).status_code == 401
        assert client.request(method, url, auth=("someone", "wrong")).status_code == 401
        assert client.request(method, url, auth=("nobody", "secret")).status_code == 401
    assert client.get("/onediff/v1/status", auth=("someone", "secret")).status_code == 200
    assert client.get("/onediff/v1/status", auth=("other", "more:colons")).status_code == 200


def test_nothing_imports_graphs_over_the_network(client: Any) -> None:
    paths = {route.path for route in client.app.routes if hasattr(route, "path")}
    assert not [path for path in paths if "import" in path or "export" in path]
