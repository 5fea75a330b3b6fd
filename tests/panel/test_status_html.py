"""The status line as the panel shows it."""

from __future__ import annotations

from onediff_ext.core.errors import OptionError
from onediff_ext.core.status import Status
from onediff_ext.panel import html
from onediff_ext.panel.panel_host import WarmUpStep


def test_the_line_is_the_status_own() -> None:
    status = Status("compiled", 16, 0, 16, speedup=1.9)
    assert status.line() in html.status_line(status, True)
    assert 'data-state="compiled"' in html.status_line(status, True)


def test_unticked_it_is_off_whatever_was_drawn_before() -> None:
    assert 'data-state="off"' in html.status_line(Status("compiled", 16, 0, 16), False)


def test_ticked_before_the_first_picture() -> None:
    assert "nothing drawn with it yet" in html.status_line(Status(), True)


def test_building_shows_even_when_unticked() -> None:
    status = Status("eager", 3, 0, 16, building=True)
    assert 'data-state="building"' in html.status_line(status, False)


def test_details_have_what_the_line_has_not() -> None:
    eager = Status("eager", reasons=("fp8 weights", "a <hook>"))
    assert "fp8" not in html.status_details(eager)
    assert "a &lt;hook&gt;" in html.status_details(eager)
    compiled = Status("compiled", 1, 0, 1, reasons=tuple(f"reason {n}" for n in range(9)))
    assert "reason 0" in html.status_details(compiled)
    assert "and 5 more" in html.status_details(compiled)
    assert "No GPU" in html.status_details(Status(), "No GPU")


def test_progress_and_messages_are_escaped() -> None:
    bar = html.progress_bar(WarmUpStep(4, 16, "<b>", seconds_left=200))
    assert "width:25%" in bar
    assert "&lt;b&gt;" in bar
    assert "3 min left" in bar
    assert "&lt;" in html.error(OptionError("<script>"))
    assert html.message("") == ""


def test_what_utf_8_lacks_is_replaced() -> None:
    for piece in (
        html.error(OptionError("a \ud800 name")),
        html.message("\udcff"),
        html.status_line(Status("eager", reasons=("\ud800",)), True),
        html.status_details(Status("compiled", 1, 0, 1, reasons=("\ud800",))),
        html.progress_bar(WarmUpStep(1, 2, "\udfff")),
    ):
        assert "?" in piece.encode("utf-8").decode("utf-8")
