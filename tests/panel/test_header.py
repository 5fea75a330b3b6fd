"""The header's text in each state and language, and the lines beneath it."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest

from onediff_ext.core.errors import OptionError
from onediff_ext.core.gpu_advice import small_gpu_advice
from onediff_ext.core.headline import Headline
from onediff_ext.core.status import Status
from onediff_ext.panel import html
from onediff_ext.panel.details import detail_lines, technical_lines
from onediff_ext.panel.header import header_of
from onediff_ext.panel.messages import MESSAGES
from onediff_ext.panel.phrases import ENGLISH, LOCALIZATIONS, TEMPLATES, phrases_in
from onediff_ext.panel.reasons import RULES, PlainReason, explain, fixed_texts
from onediff_ext.panel.status_view import StatusView
from tests.support.still_panel_host import StillPanelHost

HOOK = "attn1 has a hook or a replaced forward of another extension"
GRAPHS = Status("compiled", 16, 0, 16, blocks_compiled=70, blocks_needed=70)
MEASURED = replace(GRAPHS, size_is_measured=True)
PART = Status(
    "compiled in part",
    16,
    0,
    16,
    blocks_compiled=12,
    blocks_needed=28,
    reasons=(f"BasicTransformerBlock: {HOOK}",),
    eager_blocks=((HOOK, 16),),
    changed_by=((HOOK, "sd-webui-negpip"),),
)
PAUSED_AT_7 = "without graphs: paused at 7 of 16 graphs"
NEGPIP = explain(PART.reasons[0], ENGLISH, dict(PART.changed_by))


@pytest.mark.parametrize(
    ("status", "wanted", "why", "text"),
    [
        (GRAPHS, False, None, "off"),
        (Status(), True, None, "without graphs: no picture drawn with OneDiff yet"),
        (Status("eager"), True, None, "without graphs: graphs are not built yet"),
        (Status("captured", captures=2), True, None, "without graphs: CUDA graphs only"),
        (
            Status("eager"),
            True,
            explain("a hypernetwork changes the context", ENGLISH),
            "without graphs: a hypernetwork is on",
        ),
        (Status("eager", 7, 0, 16, building=True), True, None, "building 7 of 16 graphs"),
        (
            Status("eager", 6, 1, 16, building=True, seconds_left=40.4),
            True,
            None,
            "building 7 of 16 graphs, about 40 s left",
        ),
        (
            Status("compiled", stage="measuring", sizes_done=1, sizes_needed=3),
            True,
            None,
            "measuring size 2 of 3",
        ),
        (GRAPHS, True, None, "graphs"),
        (replace(GRAPHS, speedup=1.3), True, None, "graphs"),  # of other sizes
        (replace(MEASURED, speedup=2.31), True, None, "graphs, 2.3x"),
        (replace(MEASURED, speedup=1.05), True, None, "graphs, 1.1x"),
        (replace(MEASURED, speedup=1.049), True, None, "graphs, no gain measured"),
        (replace(MEASURED, speedup=0.9), True, None, "graphs, no gain measured"),
        (Status("eager", 7, 0, 16, waiting=9, paused=True), True, None, PAUSED_AT_7),
        (
            replace(PART, kinds_ready=7, waiting=9, paused=True),
            True,
            explain("builds are paused until Go on", ENGLISH),
            "graphs in part, 12 of 28 blocks (paused at 7 of 16 graphs)",
        ),
        (Status(warming_up=True), True, None, "waiting for its turn"),
        (Status(warming_up=True, stage="kinds"), True, None, "looking for graphs"),
        (
            PART,
            True,
            NEGPIP,
            "graphs in part, 12 of 28 blocks (sd-webui-negpip changed the model)",
        ),
    ],
)
def test_text(status: Status, wanted: bool, why: PlainReason | None, text: str) -> None:
    shown = header_of(status, wanted, why, ENGLISH)
    assert shown.text == text
    piece = html.header(shown)
    assert f'data-state="{shown.headline.value}"' in piece
    assert f'title="{text}"' in piece


@pytest.mark.parametrize("language", ["ja_JP", "zh-Hans (Stable)"])
def test_other_languages(language: str) -> None:
    words = phrases_in(language)
    for status in (Status(), GRAPHS, PART, Status("eager", 7, 0, 16, building=True)):
        english, other = (header_of(status, True, None, w).text for w in (ENGLISH, words))
        assert english != other
    assert phrases_in("None") is ENGLISH
    assert phrases_in("de_DE") is ENGLISH
    assert phrases_in("zh_TW") is ENGLISH


@pytest.mark.parametrize("path", sorted(LOCALIZATIONS.glob("*.json")), ids=lambda path: path.stem)
def test_translations_keep_every_value(path: object) -> None:
    """A translation that drops a value would hide a number, and an unknown one would raise."""
    import string

    table = json.loads(path.read_text(encoding="utf-8"))  # type: ignore[attr-defined]

    def names(text: str) -> set[str]:
        return {name for _, name, _, _ in string.Formatter().parse(text) if name}

    for template in (*TEMPLATES, *fixed_texts(), *MESSAGES):
        assert names(table[template]) == names(template), template


def test_a_why_has_six_words_at_most() -> None:
    for rule in RULES:
        assert 1 <= len(rule.why.split()) <= 6
        assert rule.advice.endswith(".")


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("weights are on another device (offloading)", "weights move"),
        ("weights are stored as fp8", "stored in another format"),
        ("a BasicTransformerBlock is a ToMeBlock of tomesd.patch", "token merging is on"),
        ("token merging patches the transformer (attn1_patch)", "token merging is on"),
        ("builds were cancelled; the next picture has its missing graphs built", "were cancelled"),
        ("builds are paused until Go on", "builds are paused"),
        ("graphs are missing, and none may be built", "on request only"),
        ("512x512 is outside the size box 64x64 - 256x256", "your own size limits"),
        ("torch 2.3.1 draws eager, captured on a GPU; graphs need 2.8 or newer: on", "this torch"),
        ("Triton is missing: python -m pip install triton", "program for builds is missing"),
        ('the setting "Lora/Networks: use old method" applies LoRAs in each forward', "LoRAs"),
        ("ResBlock: differs from eager by 0.3", "failed its check"),
        ("failed: no such file", "something went wrong"),
        ("what nobody has foreseen", "see Technical details"),
    ],
)
def test_reasons_in_plain_words(reason: str, why: str) -> None:
    plain = explain(reason, ENGLISH)
    assert why in plain.why
    assert plain.technical == reason


def test_an_extension_is_named_by_its_folder() -> None:
    assert NEGPIP.why == "sd-webui-negpip changed the model"
    assert NEGPIP.advice == "Turn sd-webui-negpip off for more speed."
    found = {"onediff_probe.py": "/webui/extensions/probe/scripts/onediff_probe.py"}
    reason = "Linear is patched by onediff_probe.py, which is not known here"
    assert explain(reason, ENGLISH, {}, found.get).why == "probe changed the model"
    assert explain(HOOK, ENGLISH).why == "another extension changed the model"


def test_what_the_last_picture_gained() -> None:
    def first(**more: float) -> str:
        return detail_lines(replace(GRAPHS, **more), True, [], ENGLISH)[0]

    assert first(picture_s=1.8, without_s=4.13) == (
        "Last picture: 1.8 s, about 4.1 s without OneDiff: saved 2.3 s (estimated)."
    )
    for without_s in (1.85, 1.8, 1.7):
        assert "no time saved" in first(picture_s=1.8, without_s=without_s)
    assert first(picture_s=1.8) == (
        "Last picture: 1.8 s. To see the time saved, add this size to the warm-up sizes and press"
        " Build now."
    )
    assert first(picture_s=1.8, size_is_measured=True) == (
        "Last picture: 1.8 s. This size is measured: the next picture shows the time saved."
    )
    assert first(picture_s=1.8, size_is_measured=True, other_pace=True) == (
        "Last picture: 1.8 s. Time saved unknown: the computer was less or more busy when this size"
        " was measured."
    )
    eager = Status("eager", picture_s=4.1, blocks_needed=70)
    assert detail_lines(eager, True, [NEGPIP], ENGLISH)[0] == "Last picture: 4.1 s."
    assert detail_lines(replace(GRAPHS, picture_s=1.8), False, [], ENGLISH) == []


def test_the_total_says_saved() -> None:
    saved = replace(GRAPHS, saved_s=11_520.0, saved_since=time.time())
    assert detail_lines(saved, True, [], ENGLISH) == [
        "With this checkpoint, graphs saved 3 h 12 min since today."
    ]
    assert detail_lines(replace(saved, saved_s=0.2), True, [], ENGLISH) == []


def test_a_gain_that_is_none_has_no_green_dot() -> None:
    shown = [
        html.header(header_of(replace(MEASURED, speedup=speedup), True, None, ENGLISH))
        for speedup in (None, 2.0, 0.9)
    ]
    assert ["data-gain" in piece for piece in shown] == [False, False, True]


def test_advice_names_the_page_of_the_settings() -> None:
    """A setting that has to be looked for is not advice."""
    advised = [rule.advice for rule in RULES if "etting" in rule.advice]
    assert len(advised) >= 4
    assert all("Settings → " in advice for advice in advised)
    token_merging = explain("a block is a ToMeBlock of tomesd.patch", ENGLISH)
    assert "in Settings → Optimizations" in token_merging.advice


def test_graphs_that_another_process_builds_are_no_fault() -> None:
    """A1111 asked for a report where two of its own sessions wanted the same graphs."""
    why = explain("could not be built: Another process has been building it for too long.", ENGLISH)
    assert why.why == "another program builds the same graphs"
    assert "report" not in why.advice


def test_the_first_time() -> None:
    def lines(status: Status, **more: bool) -> str:
        return " ".join(detail_lines(status, True, [], ENGLISH, **more))

    assert "built once, in the background. Pictures come meanwhile" in lines(Status())
    assert lines(Status(), has_graphs=True) == ""
    building = Status("eager", 0, 0, 16, building=True)
    assert "once, in the background; beside pictures" in lines(building)
    known = lines(replace(building, first_builds_s=185.0))
    assert "once, in the background: about 3 min. Pictures come meanwhile." in known
    assert "once" not in lines(GRAPHS)


def test_why_part_of_the_model_is_eager_and_what_to_do() -> None:
    (line,) = detail_lines(PART, True, [NEGPIP], ENGLISH)
    assert line == (
        "Pictures are right, but part of the model runs without graphs: sd-webui-negpip changed"
        " the model. Turn sd-webui-negpip off for more speed."
    )
    assert technical_lines(PART) == [
        f"BasicTransformerBlock: {HOOK} (16 blocks, by sd-webui-negpip)"
    ]
    paused = replace(PART, kinds_ready=12, paused=True, waiting=4)
    assert detail_lines(paused, True, [NEGPIP], ENGLISH) == [
        "Builds are paused. Graphs left to build: 4. Press Go on to have them built."
    ]


def test_an_extension_in_the_way_is_named_while_graphs_are_built() -> None:
    """The header says how the builds go on; the first line beneath names the extension."""
    expected = (
        "Pictures are right, but part of the model runs without graphs: sd-webui-negpip changed"
        " the model. Turn sd-webui-negpip off for more speed."
    )
    building = replace(PART, kinds_ready=7, building=True, picture_s=4.1, stage="building")
    measuring = replace(PART, stage="measuring", sizes_needed=2, picture_s=4.1)
    nothing_yet = replace(
        building,
        running="eager",
        blocks_compiled=0,
        eager_blocks=((HOOK, 16), ("there is no graph yet", 12)),
    )
    for status in (building, measuring, nothing_yet, replace(PART, warming_up=True)):
        assert header_of(status, True, NEGPIP, ENGLISH).headline is Headline.BUILDING
        assert detail_lines(status, True, [NEGPIP], ENGLISH)[0] == expected
        assert expected not in detail_lines(status, False, [NEGPIP], ENGLISH)
    cancelled = explain("builds were cancelled; the next picture has its missing", ENGLISH)
    assert "cancelled" not in " ".join(detail_lines(building, True, [cancelled], ENGLISH))
    whole = replace(nothing_yet, eager_blocks=((HOOK, 28),))
    assert detail_lines(whole, True, [NEGPIP], ENGLISH)[0] == (
        "Pictures are right, but drawn without graphs: sd-webui-negpip changed the model. Turn"
        " sd-webui-negpip off for more speed."
    )


def test_a_cancel_is_no_news_once_every_block_has_its_graph() -> None:
    """After the next picture the line stayed, for a graph that only img2img needs."""
    cancelled = replace(PART, kinds_ready=12, cancelled=True, waiting=1)
    assert "Builds were cancelled" in " ".join(detail_lines(cancelled, True, [], ENGLISH))
    later = replace(GRAPHS, cancelled=True, waiting=1)
    assert "cancelled" not in " ".join(detail_lines(later, True, [], ENGLISH))


def test_a_line_stays_while_only_the_time_left_changes() -> None:
    """The page asks every two seconds; what did not change keeps the user's selection."""
    building = Status("eager", 3, 0, 16, building=True, first_builds_s=100.0)
    shown = {
        tuple(detail_lines(replace(building, seconds_left=s, kinds_ready=k), True, [], ENGLISH))
        for k, s in enumerate((90.0, 60.0, 30.0))
    }
    assert len(shown) == 1


def test_progress_and_messages_are_escaped() -> None:
    bar = html.progress_bar(0.25, "<b>")
    assert "width:25%" in bar
    assert "&lt;b&gt;" in bar
    assert html.progress_bar(0.25, "") == ""
    assert "&lt;" in html.error(OptionError("<script>"))
    assert html.message("") == ""
    why = PlainReason('a "hook" of <another> extension', "", "")
    assert "&quot;hook&quot; of &lt;another&gt;" in html.header(
        header_of(Status("eager"), True, why, ENGLISH)
    )


def test_what_utf_8_lacks_is_replaced() -> None:
    why = explain("is patched by \ud800", ENGLISH, {"": "\ud800"})
    for piece in (
        html.error(OptionError("a \ud800 name")),
        html.message("\udcff"),
        html.header(header_of(Status("eager"), True, why, ENGLISH)),
        html.details(["\ud800"], []),
        html.technical(["\ud800"]),
        html.progress_bar(0.5, "\udfff"),
    ):
        assert "?" in piece.encode("utf-8").decode("utf-8")


@pytest.mark.parametrize("total", [2, 4, 6, 8, 10])
def test_a_small_gpu_is_told_what_fits(total: int, tmp_path: Path) -> None:
    host = StillPanelHost(tmp_path)
    host.memory = small_gpu_advice(total * 2**30)
    assert host.memory is not None
    view = StatusView(host)
    assert escape(host.memory) in view.show(enabled=True)[1]  # before the first picture
    host.now = Status("compiled", 16, 0, 16, blocks_compiled=3, blocks_needed=3)
    assert "GPU memory" not in view.show(enabled=True)[1]
    host.now = Status("eager", 16, 0, 16, reasons=("memory is short",))
    assert escape(host.memory) in view.show(enabled=True)[1]
    for language in ("ja_JP", "zh_CN"):
        said = phrases_in(language).translated(host.memory)
        assert "SD1.5" in said
        assert not re.search(r"\b(fits|needs|whole|memory)\b", said)


def test_a_large_gpu_needs_no_advice() -> None:
    assert small_gpu_advice(12 * 2**30) is None
