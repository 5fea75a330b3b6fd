"""Messages with values, translated: errors, notes and results that come in English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import onediff_ext
from onediff_ext.core.errors import OneDiffError, OptionError
from onediff_ext.core.shapes import MAX_SIZES, parse_sizes
from onediff_ext.panel import html
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.messages import MESSAGES
from onediff_ext.panel.phrases import ENGLISH, phrases_in

ROOT = Path(onediff_ext.__file__).parent
JAPANESE, CHINESE = phrases_in("ja_JP"), phrases_in("zh_CN")
# What raises or says what the panel shows. `serving` speaks to the command line.
STORE = ("verification", "permissions", "graph_archive", "stored_graph", "json_records")
SOURCES = (
    *(path for path in (ROOT / "panel").glob("*.py")),
    *(path for path in (ROOT / "standalone").glob("*.py") if path.stem != "serving"),
    ROOT / "core" / "shapes.py",
    ROOT / "core" / "untrusted_files.py",
    ROOT / "core" / "deepcache_options.py",
    ROOT / "core" / "guidance_options.py",
    *(ROOT / "store" / f"{name}.py" for name in (*STORE, "graph_file", "write_errors", "locks")),
    *(ROOT / "hosts" / "diffusers" / "vae").glob("*.py"),
    ROOT / "hosts" / "ldm_deepcache_unet.py",
    *(ROOT / "engine" / "deepcache").glob("*.py"),
    ROOT / "webui" / "deepcache.py",
)
# Errors and notes; `refuse` has DeepCache's reason.
SAY = ("message", "StoreProblem", "VaeNote", "refuse")


def _blank(template: str) -> str:
    return re.sub(r"\{\w*\}", "{}", template)


def _messages_of_the_source() -> Iterator[str]:
    """The texts of errors and messages, without the names of their values.

    Constants of the panel and the page are left to `test_panel.py`.
    """
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name not in SAY and not name.endswith("Error"):
                continue
            for argument in node.args[:2]:
                is_text = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                if is_text and path.parent.name not in ("panel", "standalone"):
                    yield argument.value
                if isinstance(argument, ast.JoinedStr):
                    parts = argument.values
                    yield "".join(
                        str(p.value) if isinstance(p, ast.Constant) else "{}" for p in parts
                    )


def test_the_source_has_no_message_without_a_template() -> None:
    other = (
        *("Tick ", "VAE "),  # with constants in them, which the tables have in full
        *("An image of {}x{} pixels", "The header of graph", "Put what is large"),  # for developers
        *("{} is not a graph's digest", "A digest has", "{} has no UNet that"),  # of commands
        *("{} is no way of tiling", "Choose one of", "DeepCache: a shallow call"),
        *("If you trust it, own it alone", "Graphs are native code"),  # hints that are not shown
        *("{} may hold native code", "Run `onediff-ext graphs verify`", "It is built again"),
        *("Both sides must be", "DeepCache: a forward was recorded"),  # for developers
        *("{} is not a record", "{}: {}."),  # Verify takes them apart
    )
    found = {text for text in _messages_of_the_source() if not text.startswith(other)}
    assert len(found) > 70
    assert found - set(map(_blank, MESSAGES)) == set()


ERRORS = [
    ("banana", '"banana" is not a size.'),
    ("512x768@99999", "asks for 99999 images at once"),
    ("513x768", "The nearest size is 512x768."),
    (", ".join(["64x64"] * (MAX_SIZES + 1)), f"{MAX_SIZES} are allowed"),
]


@pytest.mark.parametrize(("sizes", "english"), ERRORS)
def test_an_error_is_translated_with_its_values(sizes: str, english: str) -> None:
    with pytest.raises(OneDiffError) as raised:
        parse_sizes(sizes)
    assert english in str(raised.value)
    assert ENGLISH.translated(str(raised.value)) == str(raised.value)
    for words in (JAPANESE, CHINESE):
        shown = html.error(raised.value, words)
        assert english not in shown
        for number in re.findall(r"\d+", english):
            assert number in shown


def test_every_sentence_of_an_error_is_translated() -> None:
    with pytest.raises(OptionError) as raised:
        Choices.parse({"enabled": True, "preset": "Balancd"})
    shown = JAPANESE.translated(str(raised.value))
    assert "Did you mean" not in shown
    assert "Balanced" not in shown.split("Fast")[0] or "バランス" in shown
    assert "のことですか" in shown


def test_a_value_is_translated_too() -> None:
    note = Choices.for_picture({"enabled": True, "sizes": "banana"})[1][0]
    shown = JAPANESE.translated(note)
    assert "ウォームアップするサイズ" in shown
    assert "「banana」はサイズではありません" in shown
    assert "ignored" not in shown


@pytest.mark.parametrize("message", ["", "x" * 10_000, "a. " * 3000, "Seed. of: s is. ready {n}"])
def test_a_text_of_any_form_stays(message: str) -> None:
    assert JAPANESE.translated(message) == message


def test_values_cannot_be_markup_or_templates() -> None:
    shown = html.error(OptionError('"{n}<b>" is not a size.'), JAPANESE)
    assert "「{n}&lt;b&gt;」" in shown
