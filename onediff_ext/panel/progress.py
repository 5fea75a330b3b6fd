"""What goes on now, in one text for header and progress bar, and how much of it is done."""

from __future__ import annotations

from onediff_ext.core.status import Status
from onediff_ext.panel import phrases
from onediff_ext.panel.phrases import Phrases

_PREPARING, _MEASURING = "captures", "measuring"
_LONG_S = 20.0  # above it, a build without any estimate says how long it has gone on


def progress_text(status: Status, words: Phrases) -> str:
    """Return what goes on now, such as "building 7 of 16 graphs, about 40 s left".

    Builds are counted in graphs, measurements in sizes, from their begin to their end.

    Args:
        status: The status.
        words: The language.

    Returns:
        The text; empty when nothing goes on.
    """
    if status.building and not status.paused:
        text = words.say(phrases.BUILDING, **_graphs(status))
        return text + _time(status, words)
    if status.stage in (_PREPARING, _MEASURING):
        number = min(status.sizes_done + 1, status.sizes_needed)
        template = phrases.PREPARING if status.stage == _PREPARING else phrases.MEASURING
        return words.say(template, number=number, needed=status.sizes_needed)
    if status.paused and (status.building or status.waiting or status.warming_up):
        return words.say(phrases.PAUSED_AT, **_graphs(status))
    if status.warming_up:
        return words.say(phrases.LOOKING if status.stage else phrases.NEXT_IN_LINE)
    return ""


def progress_share(status: Status) -> float:
    """Return the finished share of builds and measurements, 0 to 1; it never falls in a warm-up."""
    sizes = status.sizes_done + status.sizes_needed * (status.stage == _MEASURING)
    if status.stage not in (_PREPARING, _MEASURING):
        sizes = 0
    done = status.kinds_ready + status.kinds_failed + sizes / 2
    needed = status.kinds_needed + status.sizes_needed
    return done / needed if needed else 0.0


def _time(status: Status, words: Phrases) -> str:
    """How long builds still take; else when the first graph is there; else how long they took."""
    if status.seconds_left is not None:
        return words.say(phrases.LEFT, time=words.duration(max(1.0, status.seconds_left)))
    if status.first_graph_s is not None:
        return words.say(phrases.FIRST_TAKES, time=words.duration(status.first_graph_s))
    if status.building_s is not None and status.building_s >= _LONG_S:
        return words.say(phrases.SO_FAR, time=words.duration(status.building_s))
    return ""


def _graphs(status: Status) -> dict[str, object]:
    return {"done": status.kinds_ready + status.kinds_failed, "needed": status.kinds_needed}
