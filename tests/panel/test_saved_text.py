"""The saved time in words."""

from __future__ import annotations

import datetime

import pytest

from onediff_ext.panel.phrases import ENGLISH, phrases_in
from onediff_ext.panel.saved_text import saved_note, saved_text
from onediff_ext.store import SavedTime

NOW = datetime.datetime(2026, 11, 25, 12).timestamp()  # a Wednesday


def days_ago(days: float) -> float:
    return NOW - days * 86400


@pytest.mark.parametrize(
    ("seconds", "since", "text"),
    [
        (11_520.0, days_ago(2), "saved 3 h 12 min since Monday"),
        (40.4, days_ago(0), "saved 40 s since today"),
        (300.0, days_ago(1), "saved 5 min since yesterday"),
        (300.0, days_ago(6), "saved 5 min since Thursday"),
        (300.0, days_ago(8), "saved 5 min since 2026-11-17"),
        (300.0, 1e300, "saved 5 min since an unknown day"),
        (0.4, days_ago(2), ""),
        (-20.0, days_ago(2), ""),
    ],
)
def test_text(seconds: float, since: float, text: str) -> None:
    assert saved_text(SavedTime(seconds, 3, since), ENGLISH, NOW) == text


@pytest.mark.parametrize(
    ("saved", "is_measured", "text"),
    [
        (None, False, "saved time: press Build now to measure it"),
        (None, True, "saved time: counts from the next picture at a measured size"),
        (SavedTime(-20.0, 3, NOW), True, "no time saved so far"),
    ],
)
def test_where_nothing_is_saved_it_says_how_it_is_measured(
    saved: SavedTime | None, is_measured: bool, text: str
) -> None:
    assert saved_note(saved, is_measured, ENGLISH) == text


def test_other_languages_have_their_days() -> None:
    saved = SavedTime(11_520.0, 3, days_ago(2))
    assert saved_text(saved, phrases_in("ja_JP"), NOW) == "月曜日から 3 時間 12 分 短縮"
