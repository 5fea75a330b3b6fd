"""The saved time of a checkpoint in words, such as "saved 3 h 12 min since Monday"."""

from __future__ import annotations

import datetime
import time

from onediff_ext.core.words import day_of
from onediff_ext.panel import phrases
from onediff_ext.panel.phrases import Phrases
from onediff_ext.store import SavedTime

_SHORTEST_S = 1.0


def saved_text(
    saved: SavedTime, words: Phrases, now: float | None = None, template: str = phrases.SAVED
) -> str:
    """Return the saved time and since when; empty when nothing was saved.

    Args:
        saved: From the store.
        words: The language.
        now: Seconds since the epoch; None for the present.
        template: The sentence.
    """
    if saved.seconds < _SHORTEST_S:
        return ""
    day = _day_text(saved.since, time.time() if now is None else now, words)
    return words.say(template, time=words.duration(saved.seconds), day=day)


def saved_note(saved: SavedTime | None, is_measured: bool, words: Phrases) -> str:
    """Return the saved time, or what to do to have it measured.

    Args:
        saved: From the store.
        is_measured: Whether a step of the checkpoint was measured.
        words: The language.
    """
    if saved is not None:
        return saved_text(saved, words) or words.say(phrases.NOTHING_SAVED)
    return words.say(phrases.SAVED_LATER if is_measured else phrases.SAVED_UNKNOWN)


def _day_text(at: float, now: float, words: Phrases) -> str:
    try:
        day = datetime.date.fromtimestamp(at)
        days = (datetime.date.fromtimestamp(now) - day).days
    except (OverflowError, OSError, ValueError):  # the store is a file, which may say anything
        return day_of(at)
    if days == 0:
        return words.say(phrases.TODAY)
    if days == 1:
        return words.say(phrases.YESTERDAY)
    return words.say(phrases.DAYS[day.weekday()]) if 1 < days < 7 else day_of(at)
