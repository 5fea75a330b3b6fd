"""A page that others can reach: a password first, and no file or folder of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onediff_ext.core.demo_files import DEMO_MODEL
from onediff_ext.core.options import CompileOptions

gradio = pytest.importorskip("gradio", reason="the page needs gradio, which is not installed")
pytest.importorskip("diffusers", reason="the page draws with diffusers, which is not installed")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The page as others reach it, by a proxy's name; here at the loopback all the same."""
    import torch

    from onediff_ext.standalone.app import StandaloneApp
    from onediff_ext.standalone.launch import make_page
    from onediff_ext.standalone.page_server import launch
    from onediff_ext.standalone.serving import parse_serving

    folder = tmp_path_factory.mktemp("page")
    options = CompileOptions(store=folder / "store", build="never")
    standalone_app = StandaloneApp(torch.device("cpu"), "auto", options)
    standalone_app.load(DEMO_MODEL)
    serving = parse_serving(
        host="127.0.0.1", port=None, open_browser=False, auth=["someone:se:cret"],
        allowed_hosts=["Pictures.example"],
    )  # fmt: skip
    assert not serving.is_local
    made = make_page(standalone_app, folder / "out", is_local=serving.is_local)
    launch(made, serving, wait=False)
    yield SimpleNamespace(
        blocks=made.blocks, url=made.blocks.local_url, standalone_app=standalone_app
    )
    made.blocks.close(verbose=False)


@pytest.fixture(scope="module")
def client(page: SimpleNamespace) -> Any:
    from gradio_client import Client

    return Client(page.url, verbose=False, auth=("someone", "se:cret"))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "config"),
        ("GET", "gradio_api/info"),
        ("GET", "gradio_api/file=/etc/passwd"),
        ("POST", "gradio_api/call/txt2img"),
        ("POST", "gradio_api/run/load"),
        ("POST", "gradio_api/queue/join"),
        ("POST", "gradio_api/upload"),
    ],
)
def test_nothing_without_the_password(page: SimpleNamespace, method: str, path: str) -> None:
    import httpx

    body = {"json": {"data": [], "fn_index": 0, "session_hash": "x"}} if method == "POST" else {}
    assert httpx.request(method, f"{page.url}{path}", **body).status_code in (401, 403)


def test_a_wrong_password_is_refused(page: SimpleNamespace) -> None:
    import httpx

    for user, password in (("someone", "secret"), ("someone", ""), ("other", "se:cret")):
        answer = httpx.post(f"{page.url}login", data={"username": user, "password": password})
        assert answer.status_code in (400, 401, 422)


def test_the_proxys_name_is_known(page: SimpleNamespace) -> None:
    import httpx

    assert httpx.get(page.url, headers={"Host": "pictures.example"}).status_code == 200
    assert httpx.get(page.url, headers={"Host": "evil.example"}).status_code == 403


def test_no_import_and_no_folders(page: SimpleNamespace) -> None:
    functions = {function.api_name for function in page.blocks.fns.values()}
    assert not {"batch", "on_import"} & functions
    assert {"txt2img", "img2img", "load"} <= functions
    ids = {one.elem_id for one in page.blocks.blocks.values()}
    assert not {"onediff_input_dir", "onediff_output_dir", "onediff_library_archive"} & ids


@pytest.mark.parametrize(
    ("checkpoint", "loras"), [("/etc/passwd", ""), (None, ""), ("", "/etc/passwd")]
)
def test_no_other_files_are_loaded(
    page: SimpleNamespace, client: Any, checkpoint: str | None, loras: str, tmp_path: Path
) -> None:
    before = page.standalone_app.image_generator
    known = str(page.standalone_app.loaded().checkpoint.path)
    try:
        said, *_ = client.predict(
            known if checkpoint == "" else checkpoint, loras, False, api_name="/load"
        )
    except Exception as exc:  # gradio's own check of the list
        said = str(exc)
    assert "others can reach it" in said or "not in the list of choices" in said
    assert page.standalone_app.image_generator is before
