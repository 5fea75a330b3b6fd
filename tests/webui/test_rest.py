"""REST under /onediff/v1."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onediff_ext.panel.fields import fields_for
from onediff_ext.webui.settings import HOST_FEATURES

SERVER = "http://127.0.0.1:7860"
JSON = {"Content-Type": "application/json"}
FIELDS = fields_for(HOST_FEATURES)


@pytest.fixture
def client(host: SimpleNamespace) -> Any:
    return make_client(host, None)


def make_client(host: SimpleNamespace, api_auth: str | None, **flags: Any) -> Any:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from onediff_ext.webui.host_access import ApiAccess
    from onediff_ext.webui.rest import add_routes
    from onediff_ext.webui.webui_panel_host import WebUIPanelHost

    app = FastAPI()
    panel_host = WebUIPanelHost(lambda: host.extension)
    access = ApiAccess.of(SimpleNamespace(api_auth=api_auth, **flags))
    add_routes(app, panel_host, access, "stand-in")
    add_routes(app, panel_host, access, "stand-in")  # "Reload UI"
    return TestClient(app, base_url=SERVER)


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
    assert len(ours) == len(set(ours)) == 8


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
        ("POST", "pause"),
        ("POST", "resume"),
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


# ------------------------------------------------------------------ hostile bodies

START = json.dumps({"sizes": "512x768"})


@pytest.mark.parametrize("name", ["sizes", "components", "preset", "deepcache"])
def test_no_depth_of_nesting_is_a_fault_of_ours(client: Any, host: Any, name: str) -> None:
    for depth in (1, 2, *range(940, 1000)):  # somewhere there, what can be read cannot be shown
        for nested in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
            content = f'{{"{name}": [{nested}]}}'
            answer = client.post("/onediff/v1/warmup", content=content, headers=JSON)
            assert answer.status_code in (400, 422), (depth, nested[:10])
    assert host.adapter.steps == []


@pytest.mark.parametrize(
    ("content", "kind", "status", "said"),
    [
        (START, "text/plain", 415, "Content-Type: application/json"),
        (START, "application/x-www-form-urlencoded", 415, "application/json"),
        (START, None, 415, "application/json"),
        ("", "application/json", 400, "empty"),
        ("  ", "application/json", 400, "empty"),
        ("{", "application/json", 400, "not JSON"),
        ('{"sizes": "512x768"', "application/json", 400, "not JSON"),
        ('{"sizes": NaN}', "application/json", 400, "NaN"),
        ("[" * 30_000, "application/json", 400, "nested too deeply"),
        ('{"sizes": ' + "9" * 20_000 + "}", "application/json", None, ""),
        (b"\xff\xfe{", "application/json", 400, "not JSON"),
        ("3", "application/json", 422, "object"),
        ("null", "application/json", 422, "object"),
        ('{"path": "/etc"}', "application/json", 422, "'path'"),
        (json.dumps({"sizes": "512x768 " * 20_000}), "application/json", 413, "65,536"),
        (json.dumps({"sizes": " " * 60_000 + "!"}), "application/json", 422, "characters"),
        (json.dumps({"sizes": ["64x64"] * 5000}), "application/json", 422, "characters"),
        (json.dumps({"sizes": "\ud800"}), "application/json", 422, "is not a size"),
        (json.dumps({"sizes": {"a": 1}}), "application/json", 422, "sizes"),
        (json.dumps({"sizes": "64x64", "components": 5}), "application/json", 422, "Components"),
        (json.dumps({"sizes": "64x64", "enabled": []}), "application/json", 422, "Enable"),
        (json.dumps({"sizes": "64x64", "preset": {}}), "application/json", 422, "Preset"),
        ('{"sizes": "64x64", "deepcache": 1e999, "preset": "Custom"}', "application/json", 422, ""),
        (
            json.dumps({"sizes": "64x64", "deepcache": {"start": "x"}}),
            "application/json",
            422,
            "start",
        ),
        (
            json.dumps({"sizes": "64x64", "size_box": "9" * 5000 + "x1 - 2x2"}),
            "application/json",
            422,
            "size box",
        ),
        (
            json.dumps({"sizes": "64x64", "batch_range": "9" * 5000}),
            "application/json",
            422,
            "batch range",
        ),
    ],
)
def test_a_body_that_is_no_good_starts_nothing(
    client: Any,
    host: SimpleNamespace,
    content: str | bytes,
    kind: str | None,
    status: int | None,
    said: str,
) -> None:
    headers = {"Content-Type": kind} if kind else {}
    start = time.process_time()
    answer = client.post("/onediff/v1/warmup", content=content, headers=headers)
    assert time.process_time() - start < 2
    assert answer.status_code == status if status else 400 <= answer.status_code < 500
    assert said in answer.json()["detail"]
    assert host.adapter.steps == []


@pytest.mark.parametrize("name", ["warmup", "cancel", "pause", "resume"])
@pytest.mark.parametrize("length", [None, b"10", b"999999999999999999999999", b"-1"])
def test_a_body_without_end_is_cut_off(client: Any, name: str, length: bytes | None) -> None:
    parts, answer = [0], []

    async def receive() -> dict[str, Any]:
        parts[0] += 1
        assert parts[0] < 20, "the body is read for ever"
        return {"type": "http.request", "body": b" " * 10_000, "more_body": True}

    async def send(message: dict[str, Any]) -> None:
        answer.append(message)

    headers = [(b"host", b"127.0.0.1:7860"), (b"content-type", b"application/json")]
    headers += [
        (b"transfer-encoding", b"chunked") if length is None else (b"content-length", length)
    ]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": f"/onediff/v1/{name}", "raw_path": b"", "query_string": b"",
        "root_path": "", "headers": headers, "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 7860),
    }  # fmt: skip
    asyncio.run(client.app(scope, receive, send))
    assert answer[0]["status"] == 413


def test_a_body_that_never_comes_is_not_waited_for(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastapi import HTTPException, Request

    from onediff_ext.webui import request_body

    async def never() -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(request_body, "TIMEOUT_S", 0.1)
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(HTTPException) as caught:
        asyncio.run(request_body.read_body(Request(scope, never), ()))
    assert caught.value.status_code == 408


@pytest.mark.parametrize("name", ["cancel", "pause", "resume"])
def test_controls_take_no_body_and_an_empty_object(client: Any, name: str) -> None:
    url = f"/onediff/v1/{name}"
    assert client.post(url).status_code == 200
    assert client.post(url, json={}).status_code == 200
    assert client.post(url, headers=JSON).status_code == 200
    assert client.post(url, json={"sizes": ""}).status_code == 422
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = client.post(url, content="a=b", headers={"Content-Type": kind})
        assert answer.status_code == 415


def test_pause_holds_the_builds_of_every_session_until_resume(
    client: Any, host: SimpleNamespace
) -> None:
    from onediff_ext.core.options import CompileOptions

    graphs, store = host.extension.graphs, host.extension.settings.store
    first = graphs._sessions.session_for(CompileOptions(backend="eager", store=store))
    assert not client.get("/onediff/v1/status").json()["paused"]
    client.post("/onediff/v1/pause")
    second = graphs._sessions.session_for(CompileOptions(store=store))
    assert first.builds_are_paused
    assert second.builds_are_paused
    client.post("/onediff/v1/resume")
    assert not first.builds_are_paused
    assert not second.builds_are_paused


def test_the_nearest_known_name_is_in_the_answer(client: Any, host: SimpleNamespace) -> None:
    for body, nearest in (
        ({"sizes": "64x64", "deepcashe": "medium"}, '"deepcache"'),
        ({"sizes": "64x64", "preset": "Balansed"}, '"Balanced"'),
        ({"sizes": "64x64", "preset": "Custom", "components": ["Unett"]}, '"UNet"'),
        ({"sizes": "64x64", "preset": "Custom", "deepcache": {"intervall": 3}}, '"interval"'),
    ):
        answer = client.post("/onediff/v1/warmup", json=body)
        assert answer.status_code == 422
        assert f"Did you mean {nearest}?" in answer.json()["detail"]
    assert host.adapter.steps == []


def test_the_schema_describes_every_kind_of_request(client: Any) -> None:
    described = client.get("/onediff/v1/schema").json()
    assert described["$schema"].startswith("https://json-schema.org/")
    definitions = described["$defs"]
    assert set(definitions) == {"choices", "empty", "batch_script", "settings", "xyz"}
    assert list(definitions["choices"]["properties"]) == [field.name for field in FIELDS]
    assert not definitions["choices"]["additionalProperties"]
    assert "onediff_build" in definitions["settings"]["properties"]
    assert definitions["batch_script"]["properties"]["batch"]["maximum"] == 64


def wait_until_done(client: Any) -> Any:
    until = time.monotonic() + 30
    while (status := client.get("/onediff/v1/status").json())["warm_up"]["running"]:
        assert time.monotonic() < until
        time.sleep(0.01)
    return status


def test_a_warm_up_after_a_refused_picture_is_seen(client: Any, host: SimpleNamespace) -> None:
    """The reason of the refused picture hid it."""
    from onediff_ext.webui.always_visible import OneDiffScript
    from tests.support.webui_stand_in import StandInJob

    OneDiffScript().process(StandInJob(), {"size_box": "64x64 - 99x99"})
    assert "outside the size box" in client.get("/onediff/v1/status").json()["line"]
    assert client.post("/onediff/v1/warmup", json={"sizes": "64x64"}).json()["started"]
    status = wait_until_done(client)
    assert "outside the size box" not in status["line"]
    assert "there is no UNet to warm up" in status["line"]
    assert "there is no UNet to warm up" in status["warm_up"]["summary"]


def test_a_warm_up_that_fails_at_once_has_started_too(
    client: Any, host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused when its thread ended before the answer was made."""
    start = threading.Thread.start

    def start_and_end(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "onediff-warm-up":
            thread.join()

    monkeypatch.setattr(threading.Thread, "start", start_and_end)
    answer = client.post("/onediff/v1/warmup", json={"sizes": "64x64"})
    assert (answer.status_code, answer.json()["started"]) == (202, True)
    assert "there is no UNet to warm up" in wait_until_done(client)["warm_up"]["summary"]


def test_a_warm_up_that_fails_says_so(
    client: Any, host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the queue is gone")

    monkeypatch.setattr(host.adapter, "run_exclusively", broken)
    assert client.post("/onediff/v1/warmup", json={"sizes": "64x64"}).status_code == 202
    assert wait_until_done(client)["warm_up"]["summary"] == "failed: the queue is gone"


# ------------------------------------------------------------------ other web sites


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:80", ""])
@pytest.mark.parametrize("name", ["status", "cancel", "warmup"])
def test_another_sites_origin_is_refused(
    client: Any, host: SimpleNamespace, origin: str, name: str
) -> None:
    method = "GET" if name == "status" else "POST"
    body = {"json": {"sizes": "64x64"}} if name == "warmup" else {}
    url = f"/onediff/v1/{name}"
    answer = client.request(method, url, headers={"Origin": origin}, **body)
    assert answer.status_code == 403
    assert "another site" in answer.json()["detail"]
    assert host.adapter.steps == []


def test_our_own_origin_is_accepted(client: Any) -> None:
    for origin in ("http://127.0.0.1:7860", "https://127.0.0.1:7860"):
        assert client.post("/onediff/v1/cancel", headers={"Origin": origin}).status_code == 200


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("localhost", 200), ("LOCALHOST:7860", 200), ("[::1]:7860", 200), ("192.168.0.7:7860", 200),
        ("evil.example", 403), ("evil.example:7860", 403), ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403), ("[evil", 403), ("127.1", 403), (" ", 403),
    ],
)  # fmt: skip
def test_a_name_that_is_not_ours_is_refused(client: Any, name: str, status: int) -> None:
    answer = client.get("/onediff/v1/status", headers={"Host": name})
    assert answer.status_code == status


def test_the_hosts_flags_name_more(host: SimpleNamespace) -> None:
    def status(given: Any, **headers: str) -> int:
        code: int = given.get("/onediff/v1/status", headers=headers).status_code
        return code

    named = make_client(host, None, server_name="pictures.example")
    assert status(named, Host="pictures.example:7860") == 200
    assert status(named, Host="other.example") == 403
    allowed = make_client(
        host, None, cors_allow_origins="https://a.example, https://b.example/",
        cors_allow_origins_regex=r"https://.*\.c\.example",
    )  # fmt: skip
    for origin in ("https://a.example", "https://b.example", "https://one.c.example"):
        assert status(allowed, Origin=origin) == 200
    for origin in ("http://a.example", "https://c.example", "https://one.c.example.evil.example"):
        assert status(allowed, Origin=origin) == 403
    # With credentials every name will do: another site does not have them.
    with_password = make_client(host, "someone:secret")
    answer = with_password.get(
        "/onediff/v1/status", headers={"Host": "proxy.example"}, auth=("someone", "secret")
    )
    assert answer.status_code == 200


# ------------------------------------------------------------------ answers


def test_a_status_that_json_lacks_words_for_is_answered(
    client: Any, host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onediff_ext.core.status import Status

    odd = Status("eager", speedup=float("nan"), reasons=("a \ud800 label",))
    monkeypatch.setattr(host.extension, "status", lambda: odd)
    answer = client.get("/onediff/v1/status")
    assert answer.status_code == 200
    assert answer.json()["speedup"] is None
    assert answer.json()["reasons"] == ["a \ud800 label"]


def test_an_error_of_the_store_is_said(
    client: Any, host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onediff_ext.core.errors import StoreError

    def broken() -> None:
        raise StoreError("The store cannot be read.", "Look at its disk.")

    monkeypatch.setattr(host.extension, "library", broken)
    answer = client.get("/onediff/v1/graphs")
    assert answer.status_code == 503
    assert answer.json()["detail"] == "The store cannot be read. Look at its disk."


def test_the_api_says_nothing_of_paths(client: Any, tmp_path: Path) -> None:
    for name in ("version", "schema", "status", "graphs"):
        assert str(tmp_path) not in client.get(f"/onediff/v1/{name}").text
