"""The panel's components and the actions of its buttons, in the installed gradio."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from onediff_ext.core.kind_key import KindKey
from onediff_ext.core.status import Status
from onediff_ext.panel.choices import Choices, from_arguments
from onediff_ext.panel.control_values import to_control
from onediff_ext.panel.fields import FIELDS
from onediff_ext.panel.messages import MESSAGES
from onediff_ext.panel.phrases import TEMPLATES
from onediff_ext.panel.reasons import fixed_texts
from onediff_ext.panel.size_source import tab_sources
from onediff_ext.session import warm_up_report
from tests.support.still_panel_host import StillPanelHost
from tests.support.ui_strings import messages_of, texts_of, texts_of_html

gradio = pytest.importorskip("gradio", reason="the panel needs gradio, which is not installed")
SOURCES = tab_sources("txt2img", "img2img")
LOCALIZATIONS = sorted((Path(__file__).resolve().parents[2] / "localizations").glob("*.json"))


@pytest.fixture
def panel_host(tmp_path: Path) -> StillPanelHost:
    return StillPanelHost(tmp_path)


@pytest.fixture
def page(panel_host: StillPanelHost) -> SimpleNamespace:
    """A panel on its own page, with a host's controls of size."""
    from onediff_ext.panel.panel import build_panel

    with gradio.Blocks() as blocks:
        enabled = gradio.Checkbox(False, label="OneDiff")
        header = gradio.HTML()
        panel = build_panel(panel_host, enabled, header, lambda name: f"x_{name}", SOURCES)
    return SimpleNamespace(blocks=blocks, panel=panel, panel_host=panel_host)


@pytest.fixture
def client(page: SimpleNamespace) -> Iterator[Any]:
    """Presses the page's buttons over HTTP, as a browser does."""
    from gradio_client import Client

    for attempt in range(3):
        try:
            page.blocks.queue().launch(
                prevent_thread_lock=True, quiet=True, server_name="127.0.0.1"
            )
            break
        except ValueError:  # a busy machine does not answer itself within two seconds
            page.blocks.close(verbose=False)
            if attempt == 2:
                raise
    try:
        yield Client(page.blocks.local_url, verbose=False)
    finally:
        page.blocks.close(verbose=False)


def arguments(**values: Any) -> list[Any]:
    """The panel's values in the order of its controls."""
    given = {f.name: f.default for f in FIELDS} | values
    return [to_control(field, given[field.name]) for field in FIELDS]


def test_each_field_has_a_control_with_its_default(page: SimpleNamespace) -> None:
    values = [control.value for control in page.panel.inputs]
    assert Choices.parse(from_arguments(values)) == Choices()
    assert [c.label for c in page.panel.inputs[1:]] == [f.label for f in FIELDS[1:]]


def test_ids_are_distinct(page: SimpleNamespace) -> None:
    ids = [b.elem_id for b in page.blocks.blocks.values() if b.elem_id]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("path", LOCALIZATIONS, ids=lambda path: path.stem)
def test_localisation_has_every_text(path: Path, page: SimpleNamespace, host: Any) -> None:
    from onediff_ext.webui.batch_script import TITLE, BatchScript
    from onediff_ext.webui.settings import SETTINGS

    with gradio.Blocks() as batch:
        BatchScript().ui(True)
    texts = {TITLE, *texts_of(page.blocks), *texts_of(batch), *texts_of_html()}
    for setting in SETTINGS:
        texts |= {setting.label, *setting.choices}
        texts |= {f"({setting.help})"} if setting.help else set()
    texts = {text for text in texts if not _is_the_same_everywhere(text)} - {
        page.panel_host.off_reason()
    }
    messages = {*messages_of("panel"), *messages_of("webui"), *TEMPLATES, *fixed_texts()}
    messages |= {*warm_up_report.TEMPLATES, *MESSAGES}
    assert len(messages) > 10
    known = json.loads(path.read_text(encoding="utf-8"))
    assert {*texts, *messages} - set(known) == set()
    assert all(known.values())


def _is_the_same_everywhere(text: str) -> bool:
    """Names, sizes, sizing rules and templates are not translated."""
    names = {
        "OneDiff",
        "UNet",
        "VAE",
        "ControlNet",
        "inductor",
        "eager",
        "oneflow",
        "own",
        "Number",
    }
    return text in {*names, "–"} or any(character.isdigit() for character in text) or "{" in text


def test_there_are_chinese_and_japanese() -> None:
    assert [path.stem for path in LOCALIZATIONS] == ["ja_JP", "zh_CN"]


def test_what_is_missing_is_said_before_anything_is_drawn(page: SimpleNamespace) -> None:
    details = page.panel.show_status
    assert "There is no GPU here" in details(False)[1]
    assert "There is no GPU here" not in details(True)[1]
    page.panel_host.missing = "Triton is missing: python -m pip install triton"
    assert "There is no GPU here" in details(False)[1]
    assert "python -m pip install triton" in details(True)[1]


def test_status_follows_the_tick(client: Any, panel_host: StillPanelHost) -> None:
    line, details, *_ = client.predict(True, api_name="/show_status")
    assert "no picture drawn with OneDiff yet" in line
    assert "Graphs are built once, in the background. Pictures come meanwhile." in details
    line, details, *_ = client.predict(False, api_name="/show_status")
    assert "off" in line
    assert "no GPU" in details
    panel_host.now = Status(
        "compiled",
        16,
        0,
        16,
        speedup=1.94,
        size_is_measured=True,
        blocks_compiled=70,
        blocks_needed=70,
    )
    assert ", 1.9x" in client.predict(True, api_name="/show_status")[0]


def warmed_up(client: Any, *given: Any, typed: str = "", tab: str = "") -> SimpleNamespace:
    """What the page shows after Build now."""
    chips, box, said, *_ = client.predict(*given, typed, tab, api_name="/warm_up")
    return SimpleNamespace(chips=chips, box=box, said=said)


def test_warm_up_shows_how_it_ended_and_what_is_wrong(
    client: Any, panel_host: StillPanelHost
) -> None:
    given = arguments(enabled=True, sizes="512x768, 64x64@2")
    assert "Ready: 2 sizes." in warmed_up(client, *given).said
    assert panel_host.warmed == ["512x768", "64x64@2"]
    assert "off" in warmed_up(client, *arguments(sizes="512x768")).said
    wrong = warmed_up(client, *arguments(enabled=True, sizes="banana")).said
    assert "not a size" in wrong


def test_build_now_without_sizes_takes_the_size_of_its_own_tab(
    client: Any, panel_host: StillPanelHost
) -> None:
    warmed_up(client, *arguments(enabled=True), tab="513x764@2")
    assert panel_host.warmed == ["512x768@2"]
    assert "no size" in warmed_up(client, *arguments(enabled=True)).said


def test_build_now_takes_a_size_that_is_typed_only(client: Any, panel_host: StillPanelHost) -> None:
    """Without Enter, the size was lost; it becomes a chip and is built."""
    job = client.submit(
        *arguments(enabled=True, sizes="64x64"), "72 x 80", "512x512@1", api_name="/warm_up"
    )
    job.result(timeout=30)
    assert panel_host.warmed == ["64x64", "72x80"]
    chips, box, *_ = job.outputs()[0]
    assert (chips["value"], box) == (["64x64", "72x80"], "")
    wrong = warmed_up(client, *arguments(enabled=True, sizes="64x64"), typed="banana")
    assert "not a size" in wrong.said
    assert panel_host.warmed == ["64x64", "72x80"]


def test_deepcache_takes_a_text_of_ones_own(client: Any, panel_host: StillPanelHost) -> None:
    given = arguments(enabled=True, sizes="64x64", preset="Custom", deepcache="4 depth=1")
    assert "Ready" in warmed_up(client, *given).said
    given = arguments(enabled=True, sizes="64x64", preset="Custom", deepcache="much")
    assert "no DeepCache interval" in warmed_up(client, *given).said


def test_pause_go_on_and_cancel_reach_the_port(client: Any, panel_host: StillPanelHost) -> None:
    panel_host.now = Status("eager", 3, 0, 5, waiting=2)
    paused = client.predict(True, api_name="/pause")
    assert panel_host.is_paused
    assert paused[0] == ""  # the status says it, for as long as it is true
    assert "Go on" in paused[2]
    gone_on = client.predict(True, api_name="/go_on")
    assert not panel_host.is_paused
    assert "Go on" not in str(gone_on)
    client.predict(True, api_name="/cancel")
    assert panel_host.cancelled == 1


def test_the_status_shows_the_buttons_that_apply(page: SimpleNamespace) -> None:
    def labels() -> list[str]:
        updates = page.panel.show_status(True)[-4:]
        buttons = page.panel.status_outputs[-4:]
        assert all(button.get_block_name() == "button" for button in buttons)
        return [
            button.value
            for button, update in zip(buttons, updates, strict=True)
            if update.get("visible", update.get("interactive"))
        ]

    assert labels() == ["Build now"]
    page.panel_host.is_warming_up = True
    assert labels() == ["Cancel"]
    page.panel_host.is_paused = True
    assert labels() == ["Go on", "Cancel"]


def test_sizes_are_added_from_tabs_pictures_and_the_keyboard(
    client: Any, panel_host: StillPanelHost
) -> None:
    chips = client.predict(["64x64"], "513x764@2", api_name="/add")[0]["value"]
    assert chips == ["64x64", "512x768@2"]
    assert "no pictures" in client.predict([], api_name="/propose")[1]
    (panel_host.root / "pictures").mkdir()
    Image.new("RGB", (640, 448)).save(panel_host.root / "pictures" / "a.png")
    assert client.predict(["64x64"], api_name="/propose")[0]["value"] == ["64x64", "640x448"]
    typed = client.predict(["64x64"], "72 x 80", api_name="/add_typed")
    assert (typed[0]["value"], typed[2]) == (["64x64", "72x80"], "")
    assert "not a size" in client.predict([], "banana", api_name="/add_typed")[1]
    for nothing in ("", "  "):  # the box is left without a word
        assert "value" not in client.predict(["64x64"], nothing, api_name="/add_typed")[0]


def test_the_report_has_versions_settings_and_status(
    client: Any, panel_host: StillPanelHost
) -> None:
    panel_host.now = Status("eager", reasons=("attn1 has a hook of another extension",))
    text = client.predict(*arguments(enabled=True), api_name="/report")["value"]
    assert "OneDiff" in text
    assert "torch" in text
    assert '"preset": "Balanced"' in text
    assert "attn1 has a hook of another extension" in text


def test_library_shows_exports_imports_and_deletes(
    client: Any, panel_host: StillPanelHost, tmp_path: Path
) -> None:
    from gradio_client import handle_file

    panel_host.library().put(
        KindKey({"class": "One"}), b"x", label="One", backend="eager", build_seconds=1, details={}
    )
    everything = "Everything"
    assert "One" in client.predict(everything, api_name="/show")[0]
    exported, said = client.predict(everything, api_name="/on_export")
    path = exported["value"] if isinstance(exported, dict) else exported
    assert "ready" in said
    assert "first" in client.predict(everything, False, api_name="/on_delete")[2]
    assert len(panel_host.library().entries()) == 1
    assert "Graphs deleted: 1." in client.predict(everything, True, api_name="/on_delete")[2]
    assert panel_host.library().entries() == []
    untrusted = client.predict(everything, handle_file(path), False, api_name="/on_import")
    assert panel_host.library().entries() == []
    assert "onediff-bad" in untrusted[2]
    assert "Tick" in untrusted[2]  # and no command line
    client.predict(everything, handle_file(path), True, api_name="/on_import")
    assert len(panel_host.library().entries()) == 1


def test_exports_do_not_add_up(
    client: Any, panel_host: StillPanelHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    panel_host.library().put(
        KindKey({"class": "One"}), b"x", label="One", backend="eager", build_seconds=1, details={}
    )
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for _ in range(3):
        assert "ready" in client.predict("Everything", api_name="/on_export")[1]
    assert len(list(folder.glob("onediff-export-*"))) == 1


def test_what_is_no_local_page_has_no_import(panel_host: StillPanelHost, tmp_path: Path) -> None:
    from onediff_ext.panel.panel import build_panel

    def names() -> set[str]:
        with gradio.Blocks() as blocks:
            enabled, header = gradio.Checkbox(), gradio.HTML()
            build_panel(panel_host, enabled, header, lambda name: f"x_{name}", SOURCES)
        functions = {function.api_name for function in blocks.fns.values()}
        return functions | {one.elem_id for one in blocks.blocks.values() if one.elem_id}

    assert {"on_import", "x_library_import", "x_library_archive"} <= names()
    panel_host.no_import = "Others can reach this page."
    assert not {"on_import", "x_library_import", "x_library_archive", "x_library_trust"} & names()
    assert "on_export" in names()
