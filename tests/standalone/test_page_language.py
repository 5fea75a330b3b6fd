"""The stand-alone page in the language of the visitor's browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from onediff_ext.core.demo_files import DEMO_MODEL
from onediff_ext.panel.phrases import ENGLISH, LOCALIZATIONS, OFF, phrases_in
from tests.support.browser import browser
from tests.support.ui_strings import messages_of, texts_of

gradio = pytest.importorskip("gradio", reason="the page needs gradio, which is not installed")
pytest.importorskip("diffusers", reason="the page draws with diffusers, which is not installed")


# Names are the same everywhere.
_SAME = {"OneDiff", "LoRA", "CFG", "UNet", "VAE", "ControlNet", "inductor", "eager", "oneflow"}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The page, served."""
    import torch

    from onediff_ext.core.options import CompileOptions
    from onediff_ext.panel import gpu_choices
    from onediff_ext.standalone import page as standalone_page
    from onediff_ext.standalone.app import StandaloneApp
    from onediff_ext.standalone.launch import make_page
    from onediff_ext.standalone.page_server import launch
    from onediff_ext.standalone.serving import Serving

    folder = tmp_path_factory.mktemp("page")
    options = CompileOptions(store=folder / "store", build="never")
    standalone_app = StandaloneApp(torch.device("cpu"), "auto", options)
    standalone_app.load(DEMO_MODEL)
    with pytest.MonkeyPatch.context() as patch:  # a second GPU shows the field "GPUs"
        patch.setattr(gpu_choices, "gpu_count", lambda: 2)
        patch.setattr(standalone_page, "off_reason", lambda: None)
        made = make_page(standalone_app, folder / "out")
    launch(made, Serving(open_browser=False), wait=False)
    yield SimpleNamespace(made=made, url=made.blocks.local_url)
    made.blocks.close(verbose=False)


@pytest.mark.parametrize(
    ("header", "language"),
    [
        ("ja,en-US;q=0.7,en;q=0.3", "ja_JP"),
        ("zh-CN", "zh_CN"),
        ("de-DE,ja;q=0.5", "ja_JP"),
        ("en-US,ja;q=0.5", ""),
        ("de-DE", ""),
        ("", ""),
        (";,,", ""),
    ],
)
def test_the_first_language_that_is_there_counts(header: str, language: str) -> None:
    from onediff_ext.standalone.page_language import phrases_for

    expected = phrases_in(language) if language else ENGLISH
    assert phrases_for(header).say(OFF) == expected.say(OFF)


@pytest.mark.parametrize("language", ["ja_JP", "zh_CN"])
def test_every_fixed_text_of_the_page_is_translated(page: SimpleNamespace, language: str) -> None:
    from onediff_ext.standalone.page_language import own_texts

    known = json.loads((LOCALIZATIONS / f"{language}.json").read_text(encoding="utf-8"))
    known |= own_texts()[language]
    texts = {*texts_of(page.made.blocks), *messages_of("standalone")}
    texts -= {*_SAME, *_choices(page.made)}
    wanted = {text for text in texts if not _is_the_same_everywhere(text)}
    assert len(wanted) > 60
    assert wanted - set(known) == set()


def _choices(made: Any) -> set[str]:
    """Names of files, samplers and sizing rules, and prompts to try."""
    picture = (made.picture[name] for name in ("sampler", "step_cache"))
    components = (made.model["checkpoint"], *picture, made.image["size"])
    names = {name for component in components for name, _ in component.choices}
    return names | {
        text for text in texts_of(made.blocks) if text.startswith(("a ", "an ", "two "))
    }


def _is_the_same_everywhere(text: str) -> bool:
    """Numbers, versions, templates and messages of the command line."""
    return "{" in text or "--" in text or text == "–" or any(map(str.isdigit, text))


def test_the_page_has_no_more_translations_than_texts(page: SimpleNamespace) -> None:
    from onediff_ext.standalone.page_language import own_texts

    texts = {*texts_of(page.made.blocks), *messages_of("standalone")}
    texts.add("Those beside the checkpoint that the page was started with.")  # not local
    assert {text for own in own_texts().values() for text in own} - texts == set()


def test_the_script_cannot_be_left_by_a_translation() -> None:
    from onediff_ext.standalone.page_language import page_script

    assert "/* tables */" not in page_script()
    assert "</" not in page_script()


def test_in_a_browser(page: SimpleNamespace) -> None:
    with browser() as chromium:
        for locale, sides, state in (
            ("ja-JP", ["幅", "高さ"], "オフ"),
            ("zh-CN", ["宽度", "高度"], "关闭"),
            ("de-DE", ["Width", "Height"], "off"),
        ):
            shown = chromium.new_context(locale=locale).new_page()
            shown.goto(page.url)
            shown.wait_for_selector(f"#onediff_header >> text={state}", timeout=60_000)
            labels = [shown.inner_text(f"#onediff_{name}") for name in ("width", "height")]
            for label, side in zip(labels, sides, strict=True):
                assert side in label
            shown.close()
