"""The stand-alone page on the demo checkpoint: its buttons over HTTP, and once in a browser."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from onediff_ext.core.demo_files import DEMO_MODEL, DEMO_PHOTOS
from onediff_ext.core.options import CompileOptions
from onediff_ext.panel.control_values import to_control
from onediff_ext.panel.fields import FIELDS
from onediff_ext.pictures.png_chunks import INFOTEXT_KEYWORD
from tests.support.browser import browser, outside

gradio = pytest.importorskip("gradio", reason="the page needs gradio, which is not installed")
pytest.importorskip("diffusers", reason="the page draws with diffusers, which is not installed")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The page, served."""
    import torch

    from onediff_ext.standalone.app import StandaloneApp
    from onediff_ext.standalone.launch import make_page
    from onediff_ext.standalone.page_server import launch
    from onediff_ext.standalone.serving import Serving

    folder = tmp_path_factory.mktemp("page")
    temporary = folder / "tmp"
    temporary.mkdir()
    # Pictures lie outside of the temporary and of the current folder, which Gradio hands out.
    patch = pytest.MonkeyPatch()
    patch.setattr(tempfile, "tempdir", str(temporary))
    options = CompileOptions(store=folder / "store", build="wait")
    standalone_app = StandaloneApp(torch.device("cpu"), "auto", options)
    standalone_app.load(DEMO_MODEL)
    made = make_page(standalone_app, folder / "out")
    launch(made, Serving(open_browser=False), wait=False)
    yield SimpleNamespace(standalone_app=standalone_app, url=made.blocks.local_url, folder=folder)
    made.blocks.close(verbose=False)
    patch.undo()


@pytest.fixture(scope="module")
def client(page: SimpleNamespace) -> Any:
    from gradio_client import Client

    return Client(page.url, verbose=False)


def arguments(
    enabled: bool = False, steps: int = 2, seed: int = 5, step_cache: str = "off"
) -> list[Any]:
    """Panel and picture inputs of the page."""
    given = {f.name: f.default for f in FIELDS}
    given |= {"enabled": enabled, "preset": "Custom", "backend": "eager", "vae": "ignore all"}
    panel = [to_control(field, given[field.name]) for field in FIELDS]
    return [*panel, "a fox", "", "Euler", steps, 4.0, seed, 1, step_cache]


def written(page: SimpleNamespace, folder: str = "out") -> list[Path]:
    return sorted((page.folder / folder).glob("*.png"))


def test_a_picture_eager_then_compiled_is_the_same(page: SimpleNamespace, client: Any) -> None:
    gallery, said, infotext, line, *_ = client.predict(*arguments(), 72, 64, api_name="/txt2img")
    assert len(gallery) == 1
    assert "1 picture in" in said
    assert "Size: 72x64" in infotext
    assert "OneDiff" not in infotext
    assert ">off<" in line
    _, _, infotext, line, *_ = client.predict(*arguments(True), 72, 64, api_name="/txt2img")
    assert "OneDiff: on" in infotext
    assert 'data-state="graphs"' in line
    eager, compiled = (Image.open(path).convert("RGB") for path in written(page)[:2])
    difference = max(abs(a - b) for a, b in zip(eager.tobytes(), compiled.tobytes(), strict=True))
    assert difference <= 1


def test_a_picture_from_a_picture_at_an_odd_size(page: SimpleNamespace, client: Any) -> None:
    from gradio_client import handle_file

    source = page.folder / "odd.png"
    Image.open(DEMO_PHOTOS / "cat.jpg").resize((90, 67)).save(source)
    gallery, said, infotext, *_ = client.predict(
        *arguments(), handle_file(str(source)), 0.9, "own", api_name="/img2img"
    )
    assert len(gallery) == 1, said
    assert "Size: 90x67" in infotext
    nothing = client.predict(*arguments(), None, 0.9, "own", api_name="/img2img")
    assert "no picture" in nothing[1]


def test_an_uploaded_picture_is_read_as_those_of_folders_are(
    page: SimpleNamespace, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradio_client import handle_file
    from PIL import EpsImagePlugin

    programs = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: programs.append(1))
    for suffix in (".eps", ".png"):  # by its name, and by another one
        source = page.folder / f"drawing{suffix}"
        Image.new("RGB", (72, 64)).save(source, "EPS")
        said = client.predict(
            *arguments(), handle_file(str(source)), 0.9, "own", api_name="/img2img"
        )[1]
        assert "onediff-bad" in said
    assert programs == []
    turned = Image.new("RGB", (80, 72))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(page.folder / "turned.jpg", exif=exif)
    source = handle_file(str(page.folder / "turned.jpg"))
    infotext = client.predict(*arguments(), source, 0.9, "own", api_name="/img2img")[2]
    assert "Size: 72x80" in infotext


@pytest.mark.parametrize("path", ["/etc/hostname", "../../etc/hostname", "/dev/zero"])
def test_no_file_of_the_machine_stands_for_an_upload(
    page: SimpleNamespace, client: Any, path: str
) -> None:
    import httpx

    given = [*arguments(), {"path": path, "meta": {"_type": "gradio.FileData"}}, 0.9, "own"]
    call = httpx.post(f"{page.url}gradio_api/call/img2img", json={"data": given})
    ended = httpx.get(f"{page.url}gradio_api/call/img2img/{call.json()['event_id']}", timeout=60)
    assert "event: error" in ended.text


def test_a_folder_of_several_sizes(page: SimpleNamespace, client: Any) -> None:
    source = page.folder / "in"
    source.mkdir()
    for number, size in enumerate([(64, 72), (80, 64), (64, 72)]):
        Image.new("RGB", size, (200, 90, 10)).save(source / f"{number}.png")
    more = [str(source), str(page.folder / "batch"), 0.9, "own", False, False, False, False]
    progress, gallery, *_ = client.predict(*arguments(), *more, api_name="/batch")
    assert "3 of 3" in progress
    assert len(gallery) == 3
    assert [Image.open(path).size for path in written(page, "batch")] == [
        (64, 72), (80, 64), (64, 72),
    ]  # fmt: skip
    assert "3 were done already" in client.predict(*arguments(), *more, api_name="/batch")[0]
    more[0] = str(page.folder / "missing")
    assert "onediff-bad" in client.predict(*arguments(), *more, api_name="/batch")[0]


def command_line_of_the_page(page: SimpleNamespace, source: Path, output: Path) -> list[str]:
    """The same settings as `arguments` and a strength of 0.9."""
    words = ["img2img", source, "-o", output, "--store", page.folder / "store", "--eager"]
    words += ["-p", "a fox", "--scheduler", "Euler", "--steps", 2, "--guidance", 4, "--seed", 5]
    return [str(word) for word in [*words, "--strength", 0.9, "--batch-size", 1]]


def test_page_and_command_line_continue_each_others_folders(
    page: SimpleNamespace, client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from onediff_ext.cli.main import main

    source, output = page.folder / "shared-in", page.folder / "shared"
    source.mkdir()
    more = [str(source), str(output), 0.9, "own", False, False, False, False]
    Image.new("RGB", (64, 72), (10, 90, 200)).save(source / "a.png")
    assert "1 of 1" in client.predict(*arguments(), *more, api_name="/batch")[0]
    Image.new("RGB", (64, 72), (10, 200, 90)).save(source / "b.png")
    assert main(command_line_of_the_page(page, source, output)) == 0
    out = capsys.readouterr().out
    assert "1 picture already done." in out
    assert "1 picture drawn" in out
    Image.new("RGB", (64, 72), (200, 90, 10)).save(source / "c.png")
    said = client.predict(*arguments(), *more, api_name="/batch")[0]
    assert "2 were done already" in said
    assert "1 of 1" in said


def test_of_the_output_folder_only_what_was_drawn_here_is_handed_out(
    page: SimpleNamespace, client: Any
) -> None:
    import httpx

    gallery, *_ = client.predict(*arguments(), 72, 64, api_name="/txt2img")
    assert Image.open(gallery[0]["image"]).size == (72, 64)
    assert INFOTEXT_KEYWORD in Image.open(gallery[0]["image"]).info
    secret = page.folder / "out" / "private.png"
    shutil.copy(written(page)[0], secret)
    answer = httpx.get(f"{page.url}gradio_api/file={secret}")
    assert answer.status_code == 403
    secret.unlink()


def test_a_page_takes_no_other_name_and_no_other_sites_requests(page: SimpleNamespace) -> None:
    import httpx

    assert httpx.get(page.url).status_code == 200
    refused = httpx.get(page.url, headers={"Host": "evil.example"})
    assert refused.status_code == 403
    assert "--allow-host" in refused.text
    call = f"{page.url}gradio_api/call/interrupt"
    body = {"data": []}
    foreign = httpx.post(call, json=body, headers={"Origin": "http://evil.example"})
    assert foreign.status_code == 403
    own = httpx.post(call, json=body, headers={"Origin": page.url.rstrip("/")})
    assert own.status_code == 200


def test_an_emptied_box_is_an_error_that_says_so() -> None:
    from onediff_ext.core.errors import OptionError
    from onediff_ext.standalone.page_events import _whole

    assert _whole(3.0, "width") == 3
    with pytest.raises(OptionError, match="The width is missing"):
        _whole(None, "width")


def test_what_cannot_be_loaded_leaves_the_checkpoint(page: SimpleNamespace, client: Any) -> None:
    before = page.standalone_app.image_generator
    odd = ["/nowhere/model.safetensors", "x" * 300, "/dev/zero", "a\0b", str(page.folder)]
    if hasattr(os, "mkfifo"):
        os.mkfifo(page.folder / "pipe.safetensors")
        odd.append(str(page.folder / "pipe.safetensors"))
    for name in odd:
        said, *_ = client.predict(name, "", False, api_name="/load")
        assert "onediff-bad" in said
    loaded = str(before.checkpoint.path)
    for name in [*odd, "x:y:z", "x" * 5000 + ":0.5"]:
        said, *_ = client.predict(loaded, name, False, api_name="/load")
        assert "onediff-bad" in said
    assert page.standalone_app.image_generator is before


def test_interrupt_ends_the_loading(page: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    from onediff_ext.standalone.app import CancelledError
    from onediff_ext.store import ContentHashes

    def hashed(_: Any, path: Path) -> str:
        page.standalone_app.cancel()  # as the button does, while a large file is read
        return "ab" * 32

    before = page.standalone_app.image_generator
    monkeypatch.setattr(ContentHashes, "content_hash", hashed)
    with pytest.raises(CancelledError):
        page.standalone_app.load(before.checkpoint.path)
    assert page.standalone_app.image_generator is before


def test_interrupt_ends_the_drawing(page: SimpleNamespace, client: Any) -> None:
    job = client.submit(*arguments(steps=100), 64, 64, api_name="/txt2img")
    while not page.standalone_app.is_busy:
        assert not job.done()
    page.standalone_app.cancel()
    assert "Interrupted." in job.result(timeout=60)[1]


def test_text_that_is_no_warm_up_size_is_ignored_and_said(
    page: SimpleNamespace,
    client: Any,
) -> None:
    given = arguments()
    given[[field.name for field in FIELDS].index("sizes")] = "banana"
    gallery, said, *_ = client.predict(*given, 72, 64, api_name="/txt2img")
    assert len(gallery) == 1
    assert "1 picture in" in said
    assert "Warm-up sizes ignored" in said


def test_in_a_browser(page: SimpleNamespace) -> None:
    """Ticks, changes a fold, draws; at every width nothing stands out of the panel."""
    with browser() as chromium:
        shown = chromium.new_page(viewport={"width": 1300, "height": 1000})
        errors: list[str] = []
        shown.on("pageerror", lambda error: errors.append(str(error)))
        shown.goto(page.url)
        shown.wait_for_selector("#onediff_header .onediff-status")
        shown.wait_for_selector("#onediff_header >> text=off")
        for name, value in (("steps", 2), ("width", 64), ("height", 64)):
            shown.fill(f"#onediff_{name} input[type=number]", str(value))
        shown.click("#onediff_enabled input")
        shown.wait_for_selector("#onediff_header .onediff-status:not([data-state=off])")
        shown.click("#onediff_add_size_0")
        shown.wait_for_selector("#onediff_sizes >> text=64x64")
        shown.click("#onediff_preset_fold > .label-wrap")
        shown.click("#onediff_vae label:has-text('ignore all')")
        shown.wait_for_selector("#onediff_preset input[value=Custom]:checked")
        shown.click("#onediff_enabled input")
        shown.click("#onediff_text_go")
        shown.wait_for_selector("#onediff_said >> text=1 picture in", timeout=60_000)
        assert shown.locator("#onediff_gallery img").count()
        shown.click("#onediff_library > .label-wrap")
        shown.wait_for_selector("#onediff_library_table >> text=graph", timeout=60_000)
        for width in (320, 480, 650, 1024, 1400, 2000):
            shown.set_viewport_size({"width": width, "height": 1000})
            shown.wait_for_timeout(200)
            assert outside(shown, "#onediff_panel") == [], width
        assert errors == []
