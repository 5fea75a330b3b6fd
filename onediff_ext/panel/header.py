"""The header: one of five short texts with a colour. All else stands beneath it."""

from __future__ import annotations

from dataclasses import dataclass

from onediff_ext.core.headline import Headline, headline
from onediff_ext.core.status import Status
from onediff_ext.panel import phrases
from onediff_ext.panel.phrases import Phrases
from onediff_ext.panel.reasons import PlainReason


@dataclass(frozen=True)
class Header:
    """What the header shows.

    Args:
        headline: Decides the colour.
        text: The most important words come first: a narrow header cuts the end.
    """

    headline: Headline
    text: str


def header_of(status: Status, wanted: bool, why: PlainReason | None, words: Phrases) -> Header:
    """Return the header for a status.

    Args:
        status: The status.
        wanted: Whether OneDiff is ticked.
        why: The first eager reason in plain words; None without one.
        words: The language.
    """
    state = headline(status, wanted)
    if state is Headline.OFF:
        return Header(state, words.say(phrases.OFF))
    if state is Headline.BUILDING:
        return _building(state, status, words)
    if state is Headline.GRAPHS:
        times = status.speedup
        more = "" if times is None else words.say(phrases.SPEEDUP, times=f"{times:.1f}")
        return Header(state, words.say(phrases.GRAPHS) + more)
    if state is Headline.PART:
        counts = {"done": status.blocks_compiled, "needed": status.blocks_needed}
        more = words.say(phrases.BLOCKS, **counts)
        if why is not None:
            more += words.say(phrases.WHY_IN_BRACKETS, why=why.why)
        return Header(state, words.say(phrases.PART) + more)
    text = why.why if why is not None else words.say(_why_without(status))
    return Header(state, words.say(phrases.WITHOUT) + words.say(phrases.WHY, why=text))


def _building(state: Headline, status: Status, words: Phrases) -> Header:
    if status.building:
        done, needed = status.kinds_ready + status.kinds_failed, status.kinds_needed
        main = words.say(phrases.BUILDING, done=done, needed=needed)
    else:
        done, needed = status.sizes_done, status.sizes_needed
        main = words.say(phrases.MEASURING, done=done, needed=needed)
    if status.seconds_left is None:
        return Header(state, main)
    left = words.duration(max(1.0, status.seconds_left))
    return Header(state, main + words.say(phrases.LEFT, time=left))


def _why_without(status: Status) -> str:
    if status.running == "off":
        return phrases.NO_PICTURE_YET
    return phrases.CUDA_GRAPHS_ONLY if status.captures else phrases.NOT_BUILT_YET
