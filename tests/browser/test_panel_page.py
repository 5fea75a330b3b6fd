"""The panel in a real browser: its states, widths, languages, themes, buttons and keys."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from onediff_ext.core.headline import Headline
from onediff_ext.core.kind_key import KindKey
from onediff_ext.core.status import Status
from onediff_ext.store import CheckpointRecords, GraphLibrary
from tests.support.browser import (
    GRADIOS_OWN_RULES,
    assert_looks_like,
    axe_violations,
    outside,
)
from tests.support.header_states import LONG, STATES, TEXTS
from tests.support.panel_page import ACCORDION, PanelPage

WIDTHS = (320, 360, 480, 650, 1024, 1400, 2000)
LANGUAGES = ("", "ja_JP", "zh_CN")
REFERENCES = Path(__file__).with_name("references")
FOLDS = ("preset_fold", "advanced", "library", "import", "technical")
_HEAD = """
() => {
  const accordion = document.querySelector('#onediff_txt2img');
  const head = accordion.querySelector('.label-wrap');
  const rect = element => element.getBoundingClientRect();
  const [title, extra] = head.children;
  const arrow = head.lastElementChild;
  const words = document.createRange();
  words.selectNodeContents(title);
  const lines = new Set([...words.getClientRects()].map(line => Math.round(line.bottom / 12)));
  return {box: rect(head), title: rect(title), lines: lines.size,
          status: rect(head.querySelector('.onediff-status')),
          extra: rect(extra), arrow: rect(arrow), words: rect(head.querySelector('.onediff-text')),
          page: [document.documentElement.scrollWidth, window.innerWidth]};
}
"""


@pytest.fixture(autouse=True)
def opened(panel_page: PanelPage) -> None:
    (panel_page.folder / "done.txt").unlink(missing_ok=True)
    (panel_page.folder / "status.json").unlink(missing_ok=True)
    panel_page.open()


def untick(panel_page: PanelPage) -> None:
    panel_page.page.click(f"#{ACCORDION}-visible-checkbox")


def test_each_state_has_its_text_and_its_colour(panel_page: PanelPage) -> None:
    colours = set()
    for state, status in STATES.items():
        panel_page.show(status)
        if state is Headline.OFF:
            untick(panel_page)
        line = panel_page.page.locator(f"#{ACCORDION} .onediff-status")
        panel_page.until(
            lambda line=line, state=state: line.get_attribute("data-state") == state.value,
            state.value,
        )
        assert line.get_attribute("title") == TEXTS[state]
        assert line.inner_text().replace("\n", "") == TEXTS[state]
        dot = line.locator(".onediff-dot")
        colours.add(
            dot.evaluate("e => getComputedStyle(e).background.replace(/rgba?\\(0, 0, 0, 0\\)/, '')")
        )
        if state is Headline.OFF:
            untick(panel_page)  # ticked again
    assert len(colours) == len(STATES)
    assert panel_page.errors == []


def test_the_header_stays_in_its_box_at_any_width(panel_page: PanelPage) -> None:
    page = panel_page.page
    statuses = [STATES[Headline.WITHOUT], STATES[Headline.BUILDING], STATES[Headline.PART], LONG]
    statuses += [PAUSED, replace(STATES[Headline.GRAPHS], speedup=0.9)]
    for status, language in itertools.product(statuses, LANGUAGES):
        panel_page.show(status, language)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 1000})
            head = page.evaluate(_HEAD)
            where = (width, language, status.running, head)
            scroll, inner = head["page"]
            assert scroll <= inner, where
            assert head["box"]["height"] < 60, where  # one line
            assert head["lines"] == 1, where
            assert head["arrow"]["width"] > 0, where
            assert head["arrow"]["right"] <= head["box"]["right"] + 1, where
            assert head["status"]["right"] <= head["arrow"]["left"] + 1, where
            assert head["title"]["right"] <= head["status"]["left"] + 1, where
            assert head["words"]["width"] >= 40, where
            assert outside(page, f"#{ACCORDION}") == [], where
    page.set_viewport_size({"width": 650, "height": 1000})


def test_everything_stays_in_the_panel_with_all_folds_open(panel_page: PanelPage) -> None:
    page = panel_page.page
    panel_page.show(LONG)
    store_a_graph(panel_page.folder / "store")
    for name in FOLDS:
        panel_page.fold(name)
    panel_page.until(lambda: "sd1" in panel_page.text("library_table"), "the table")
    panel_page.press("copy_report")
    panel_page.until(lambda: page.locator(f"#{ACCORDION}_report textarea").count(), "the report")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 1000})
        page.wait_for_timeout(100)
        assert outside(page, f"#{ACCORDION}") == [], width
        scroll, inner = page.evaluate(_HEAD)["page"]
        assert scroll <= inner, width
    page.set_viewport_size({"width": 650, "height": 1000})
    shutil.rmtree(panel_page.folder / "store")


def store_a_graph(root: Path) -> None:
    """One graph of a checkpoint with a long name, and one that is missing."""
    library = GraphLibrary(root, 10**9)
    graph = library.put(
        KindKey({"class": "One"}), b"x", label="One", backend="eager", build_seconds=1, details={}
    )
    CheckpointRecords(library.folder).record(
        "a" * 64,
        name="a-checkpoint-with-a-name-" * 3,
        path="/model.safetensors",
        architecture="sd1",
        kinds={graph.digest: 1, "f" * 64: 1},
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_looks_as_it_did(panel_page: PanelPage, theme: str) -> None:
    """ONEDIFF_NEW_PICTURES=1 draws the references again: look at each before it is committed."""
    panel_page.open(theme)
    panel_page.show(STATES[Headline.PART])
    panel_page.page.add_style_tag(content="[id$=_details] p:last-child { display: none; }")
    shot = panel_page.page.locator(f"#{ACCORDION}").screenshot()
    name = f"gradio-{panel_page.gradio.partition('.')[0]}-{theme}.png"
    assert_looks_like(shot, REFERENCES / name)


def test_what_was_gained_and_why_it_was_not_more(panel_page: PanelPage) -> None:
    panel_page.show(STATES[Headline.GRAPHS])
    assert "1.8 s, about 4.1 s without OneDiff" in panel_page.text("details")
    panel_page.show(STATES[Headline.PART])
    assert "sd-webui-negpip changed the model." in panel_page.text("details")
    assert "Turn sd-webui-negpip off for more speed." in panel_page.text("details")
    assert "attn1" not in panel_page.text("details")
    panel_page.fold("technical")
    panel_page.until(lambda: "attn1 has a hook" in panel_page.text("technical"), "the reason")
    panel_page.press("copy_report")
    box = panel_page.page.locator(f"#{ACCORDION}_report textarea")
    panel_page.until(lambda: "attn1" in (box.input_value() if box.count() else ""), "the report")
    assert f"gradio {panel_page.gradio}" in box.input_value()


def chips(panel_page: PanelPage) -> str:
    return panel_page.text("sizes")


def test_sizes_are_chips(panel_page: PanelPage) -> None:
    page = panel_page.page
    panel_page.press("add_size_0")
    panel_page.until(lambda: "512x768@2" in chips(panel_page), "the size of this tab")
    panel_page.press("add_size_1")
    panel_page.until(lambda: "640x448@2" in chips(panel_page), "the size of the other tab")
    box = page.locator(f"#{ACCORDION}_another_size").locator("input, textarea")
    box.fill("72x80")
    box.press("Enter")
    panel_page.until(lambda: "72x80" in chips(panel_page), "a typed size")
    box.fill("banana")
    box.press("Enter")
    panel_page.until(lambda: "not a size" in panel_page.text("build_message"), "the error")
    box.fill("")
    page.locator(f"#{ACCORDION}_sizes .token-remove").first.click()
    panel_page.until(lambda: "512x768" not in chips(panel_page), "the removal")
    panel_page.press("warm_up")
    expected = ["built for 640x448@2", "built for 72x80"]
    panel_page.until(lambda: panel_page.done() == expected, "the build")


@pytest.mark.parametrize("leave", ["Tab", "click", "Build now"])
def test_a_size_that_is_typed_without_enter_becomes_a_chip(
    panel_page: PanelPage, leave: str
) -> None:
    page = panel_page.page
    box = page.locator(f"#{ACCORDION}_another_size").locator("input, textarea")
    box.click()
    box.press_sequentially("72x80")
    if leave == "Tab":
        box.press("Tab")
    elif leave == "click":
        page.locator(f"#{ACCORDION}_details").first.click()
    else:
        panel_page.press("warm_up")
    panel_page.until(lambda: "72x80" in chips(panel_page), "the chip")
    panel_page.until(lambda: box.input_value() == "", "the empty box")
    if leave == "Build now":
        panel_page.until(lambda: panel_page.done() == ["built for 72x80"], "the build")


BUILDS = replace(STATES[Headline.BUILDING], warming_up=True, sizes_needed=1)
PAUSED = replace(BUILDS, building=False, paused=True, waiting=9)


def test_each_button_is_there_while_it_does_something(panel_page: PanelPage) -> None:
    """A warm-up that is paused and goes on ends with the same line as any other."""

    def shown(*names: str) -> None:
        panel_page.until(lambda: panel_page.buttons() == list(names), f"{names}")

    def show(status: Status) -> None:
        panel_page.show(status, warms_up=status.warming_up)

    panel_page.show(STATES[Headline.PART], warms_up=True)
    shown("warm_up")
    panel_page.press("warm_up")
    panel_page.until(lambda: panel_page.done() == ["built for 512x768@2"], "the warm-up")
    show(BUILDS)
    shown("pause", "cancel")
    panel_page.press("pause")
    show(PAUSED)
    shown("go_on", "cancel")
    panel_page.press("go_on")
    show(replace(BUILDS, kinds_ready=12))
    shown("pause", "cancel")
    show(replace(STATES[Headline.GRAPHS], warming_up=True, stage="measuring", sizes_needed=1))
    shown("cancel")
    assert panel_page.done() == ["built for 512x768@2", "paused", "goes on"]
    show(STATES[Headline.GRAPHS])
    panel_page.until(lambda: "done for 512x768@2" in panel_page.text("build_message"), "the end")
    shown("warm_up")
    show(STATES[Headline.BUILDING])
    shown("warm_up", "pause")
    show(replace(PAUSED, warming_up=False))
    shown("warm_up", "go_on")
    assert panel_page.errors == []


def test_cancel_is_pressed_and_the_warm_up_says_how_it_ended(panel_page: PanelPage) -> None:
    panel_page.show(STATES[Headline.PART], warms_up=True)
    panel_page.press("warm_up")
    panel_page.until(lambda: panel_page.done() == ["built for 512x768@2"], "the warm-up")
    panel_page.show(BUILDS, warms_up=True)
    panel_page.until(lambda: "cancel" in panel_page.buttons(), "the button")
    panel_page.press("cancel")
    panel_page.until(lambda: panel_page.done()[-1] == "cancelled", "the cancel")
    panel_page.show(STATES[Headline.PART])
    panel_page.until(lambda: "done for" in panel_page.text("build_message"), "the end")


def test_the_header_and_the_bar_say_the_same(panel_page: PanelPage) -> None:
    page = panel_page.page
    for status in (BUILDS, replace(BUILDS, kinds_ready=9, seconds_left=200.0)):
        panel_page.show(status)
        header = page.locator(f"#{ACCORDION} .onediff-status").get_attribute("title")
        bar = page.locator(f"#{ACCORDION}_progress .onediff-bar")
        panel_page.until(lambda bar=bar, text=header: bar.inner_text() == text, "the same text")
        assert bar.locator("i").bounding_box()["width"] > 0
    panel_page.show(STATES[Headline.GRAPHS])
    panel_page.until(lambda: not bar.count(), "no bar")


def test_graphs_without_a_gain_have_no_green_dot(panel_page: PanelPage) -> None:
    dot = panel_page.page.locator(f"#{ACCORDION} .onediff-dot")
    panel_page.show(STATES[Headline.GRAPHS])
    green = dot.evaluate("e => getComputedStyle(e).backgroundColor")
    panel_page.show(replace(STATES[Headline.GRAPHS], speedup=0.9))
    assert dot.evaluate("e => getComputedStyle(e).backgroundColor") != green
    line = panel_page.page.locator(f"#{ACCORDION} .onediff-status")
    assert line.get_attribute("title") == "graphs, no gain measured"


def test_the_preset_shows_its_choice_and_turns_to_custom(panel_page: PanelPage) -> None:
    page = panel_page.page
    panel_page.fold("preset_fold")
    page.locator(f"#{ACCORDION}_preset label", has_text="Maximum").click()
    deepcache = page.locator(f"#{ACCORDION}_deepcache input")
    panel_page.until(lambda: deepcache.input_value() == "medium", "the preset's DeepCache")
    page.locator(f"#{ACCORDION}_vae label", has_text="ignore all").click()
    custom = page.locator(f"#{ACCORDION}_preset input[value=Custom]")
    panel_page.until(custom.is_checked, "Custom")
    names = page.locator(f"#{ACCORDION}_components label").all_inner_texts()
    assert [name.strip() for name in names] == ["UNet", "ControlNet"]


def test_the_library_fills_when_it_opens(panel_page: PanelPage) -> None:
    assert panel_page.page.locator(f"#{ACCORDION}_library_table .onediff-note").count() == 0
    panel_page.fold("library")
    panel_page.until(lambda: "No graphs yet" in panel_page.text("library_table"), "the table")
    assert panel_page.page.locator(f"#{ACCORDION}_library_import").count() == 0 or not (
        panel_page.page.locator(f"#{ACCORDION}_library_import").is_visible()
    )


def test_the_keyboard_reaches_everything(panel_page: PanelPage) -> None:
    """From the tick on, Tab passes every button, fold and box; Enter and Space press them."""
    page = panel_page.page
    panel_page.show(STATES[Headline.BUILDING])
    panel_page.until(lambda: panel_page.buttons() == ["warm_up", "pause"], "the buttons")
    page.locator(f"#{ACCORDION}-visible-checkbox").focus()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "() => { const up = document.activeElement.closest('[id^=onediff_txt2img]');"
                " return up ? up.id : ''; }"
            )
        )
    wanted = {"preset", "sizes", "another_size", "add_size_0", "add_size_1", "recent_sizes"}
    wanted |= {"warm_up", "pause", *FOLDS}
    assert {f"{ACCORDION}_{name}" for name in wanted} - reached == set()
    page.locator(f"#{ACCORDION}_pause").focus()
    page.keyboard.press("Enter")
    panel_page.until(lambda: panel_page.done() == ["paused"], "the pause")
    page.locator(f"#{ACCORDION}_technical > .label-wrap").focus()
    page.keyboard.press("Enter")
    panel_page.until(page.locator(f"#{ACCORDION}_copy_report").is_visible, "the fold")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessibility(panel_page: PanelPage, theme: str) -> None:
    panel_page.open(theme)
    panel_page.fold("technical")
    for state in (Headline.WITHOUT, Headline.BUILDING, Headline.GRAPHS, Headline.PART):
        panel_page.show(STATES[state])
        for own in (".onediff-status", f"#{ACCORDION}_details", f"#{ACCORDION}_technical_text"):
            selector = own if own.startswith("#") else f"#{ACCORDION} {own}"
            assert axe_violations(panel_page.page, selector) == [], (state, own)
    found = axe_violations(panel_page.page, f"#{ACCORDION}", without=GRADIOS_OWN_RULES)
    assert found == []


def test_a_second_click_on_build_now_presses_nothing_else(panel_page: PanelPage) -> None:
    """Pause and Cancel appear below it, or in its place where the lines above become fewer."""
    page, build_now = panel_page.page, panel_page.page.locator(f"#{ACCORDION}_warm_up")
    panel_page.show(STATES[Headline.PART], warms_up=True)
    box = build_now.bounding_box()
    panel_page.press("warm_up")
    panel_page.show(BUILDS, warms_up=True)
    panel_page.until(lambda: panel_page.buttons() == ["pause", "cancel"], "the buttons")
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_timeout(500)
    assert panel_page.done() == ["built for 512x768@2"]
    panel_page.show(STATES[Headline.PART])
