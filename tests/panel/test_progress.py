"""What goes on now: one text for header and bar, and the buttons that apply."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import pytest

from onediff_ext.core.status import Status
from onediff_ext.panel.build_buttons import build_buttons
from onediff_ext.panel.details import detail_lines
from onediff_ext.panel.phrases import ENGLISH, phrases_in
from onediff_ext.panel.progress import progress_share, progress_text
from onediff_ext.panel.reasons import explain
from onediff_ext.panel.status_view import StatusView
from onediff_ext.panel.warm_up_run import summary_text
from onediff_ext.session import status as session_status
from onediff_ext.session.warm_up_report import WarmUpReport
from tests.support.still_panel_host import StillPanelHost

BUILDING = Status(
    "eager", 7, 0, 16, building=True, seconds_left=40.4, warming_up=True, sizes_needed=3
)
MEASURING = Status(
    "compiled", 16, 0, 16, stage="measuring", sizes_done=1, sizes_needed=3, warming_up=True
)
PAUSED = Status("eager", 7, 0, 16, waiting=9, paused=True)
CANCELLED = Status("eager", 7, 0, 16, waiting=9, cancelled=True)
WARM_UP = [
    Status(warming_up=True),
    Status(stage="kinds", sizes_needed=3, warming_up=True),
    Status("eager", 0, 0, 16, building=True, stage="exporting", sizes_needed=3, warming_up=True),
    BUILDING,
    replace(BUILDING, paused=True),  # workers are ending
    replace(BUILDING, building=False, paused=True, waiting=9),
    replace(BUILDING, kinds_ready=15, kinds_failed=1),
    *(replace(MEASURING, stage="captures", sizes_done=done) for done in range(4)),
    *(replace(MEASURING, sizes_done=done) for done in range(4)),
]
"""A warm-up from begin to end."""


@pytest.mark.parametrize("status", [BUILDING, MEASURING, *WARM_UP])
@pytest.mark.parametrize("language", ["", "ja_JP"])
def test_the_header_and_the_bar_say_the_same(status: Status, language: str, tmp_path: Path) -> None:
    words = phrases_in(language)

    class Host(StillPanelHost):
        def status(self) -> Status:
            return status

        def phrases(self) -> object:
            return words

    header, _, _, bar = StatusView(Host(tmp_path)).show(enabled=True)
    text = progress_text(status, words)
    assert text
    assert text in header
    assert f"<span>{text}</span>" in bar


def test_each_number_names_its_unit_and_the_bar_never_goes_back() -> None:
    texts = [progress_text(status, ENGLISH) for status in WARM_UP]
    assert texts[4] == texts[5] == "paused at 7 of 16 graphs"
    assert texts[3] == "building 7 of 16 graphs, about 40 s left"
    for text in texts:
        assert not any(map(str.isdigit, text)) or "graphs" in text or " size " in text
    shares = [progress_share(status) for status in WARM_UP]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)


def test_nothing_goes_on() -> None:
    for status in (Status(), CANCELLED, Status("compiled", 16, 0, 16)):
        assert progress_text(status, ENGLISH) == ""


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        (Status(), "Build now"),
        (CANCELLED, "Build now"),
        (replace(BUILDING, warming_up=False), "Build now, Pause"),
        (PAUSED, "Build now, Go on"),
        (replace(PAUSED, waiting=0), "Build now, Go on"),
        (BUILDING, "Pause, Cancel"),
        (MEASURING, "Cancel"),
        (replace(PAUSED, warming_up=True), "Go on, Cancel"),
        (Status(warming_up=True), "Cancel"),
    ],
)
def test_buttons_that_apply(status: Status, shown: str) -> None:
    names = ("Build now", "Pause", "Go on", "Cancel")
    visible = astuple(build_buttons(status))
    assert ", ".join(name for name, is_on in zip(names, visible, strict=True) if is_on) == shown


def test_pause_and_cancel_are_never_said_in_one_breath() -> None:
    """Go on ends a pause; the next picture ends a cancel. Each text says one of the two."""
    paused = [
        *detail_lines(PAUSED, True, [], ENGLISH),
        *detail_lines(replace(PAUSED, waiting=0, building=True), True, [], ENGLISH),
        *detail_lines(replace(PAUSED, waiting=0, kinds_ready=16), True, [], ENGLISH),
        session_status.PAUSED,
        explain(session_status.PAUSED, ENGLISH).advice,
    ]
    cancelled = [
        *detail_lines(CANCELLED, True, [], ENGLISH),
        session_status.CANCELLED,
        explain(session_status.CANCELLED, ENGLISH).advice,
        WarmUpReport(built=7, cancelled=True).line(),
    ]
    for text in paused:
        assert "Go on" in text
        assert "next picture" not in text
    for text in cancelled:
        assert "next picture has its missing graphs built" in text
        assert "Go on" not in text


def test_what_a_cancel_means_is_said_once() -> None:
    """The status says it, a line above the result."""
    assert summary_text(WarmUpReport(built=7, cancelled=True), ENGLISH) == (
        "Cancelled. Graphs built: 7."
    )


def test_the_result_is_translated_and_names_its_reason_plainly() -> None:
    report = WarmUpReport(built=3, eager=1, why_eager="Triton is missing: pip install triton")
    assert "(a program for builds is missing)" in summary_text(report, ENGLISH)
    japanese = summary_text(report, phrases_in("ja_JP"))
    assert japanese != summary_text(report, ENGLISH)
    assert not any("a" <= letter <= "z" for letter in japanese)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status(building_s=5.0), "building 0 of 9 graphs"),
        (
            Status(first_graph_s=36.0, building_s=5.0),
            "building 0 of 9 graphs, the first takes about 36 s",
        ),
        (Status(building_s=150.0), "building 0 of 9 graphs, for 2 min so far"),
        (
            Status(seconds_left=70.0, first_graph_s=9.0, building_s=150.0),
            "building 0 of 9 graphs, about 70 s left",
        ),
    ],
)
def test_a_build_without_an_estimate_says_what_is_known(status: Status, text: str) -> None:
    building = replace(status, running="eager", building=True, kinds_needed=9)
    assert progress_text(building, ENGLISH) == text
    for language in ("ja_JP", "zh_CN"):
        assert "about" not in (said := progress_text(building, phrases_in(language)))
        assert "so far" not in said
