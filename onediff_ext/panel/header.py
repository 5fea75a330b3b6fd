"""The header: one of five short texts with a colour. All else stands beneath it."""

from __future__ import annotations

from dataclasses import dataclass

from onediff_ext.core.headline import Headline, headline
from onediff_ext.core.status import Status
from onediff_ext.core.words import times_faster
from onediff_ext.panel import phrases
from onediff_ext.panel.phrases import Phrases
from onediff_ext.panel.progress import progress_text
from onediff_ext.panel.reasons import PlainReason


@dataclass(frozen=True)
class Header:
    """What the header shows.

    Args:
        headline: Decides the colour.
        text: The most important words come first: a narrow header cuts the end.
        gains: Whether graphs may be faster, as far as it was measured; decides the colour too.
    """

    headline: Headline
    text: str
    gains: bool = True


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
        return Header(state, progress_text(status, words))
    if state is Headline.GRAPHS:
        return _graphs(status.speedup if status.size_is_measured else None, words)
    reason = "" if why is None else why.why
    if status.paused:
        reason = progress_text(status, words) or reason
    if state is Headline.PART:
        counts = {"done": status.blocks_compiled, "needed": status.blocks_needed}
        more = words.say(phrases.BLOCKS, **counts)
        if reason:
            more += words.say(phrases.WHY_IN_BRACKETS, why=reason)
        return Header(state, words.say(phrases.PART) + more)
    text = reason or words.say(_without_reason(status))
    return Header(state, words.say(phrases.WITHOUT) + words.say(phrases.WHY, why=text))


def _graphs(speedup: float | None, words: Phrases) -> Header:
    """The header where every block runs its graph; it claims a gain only where there is one.

    Args:
        speedup: Measured at the last picture's size; None elsewhere.
        words: The language.
    """
    text, gains = words.say(phrases.GRAPHS), True
    if speedup is not None:
        times = times_faster(speedup)
        gains = times is not None
        text += words.say(phrases.SPEEDUP, times=times) if gains else words.say(phrases.NO_GAIN)
    return Header(Headline.GRAPHS, text, gains)


def _without_reason(status: Status) -> str:
    if status.running == "off":
        return phrases.NO_PICTURE_YET
    return phrases.CUDA_GRAPHS_ONLY if status.captures else phrases.NOT_BUILT_YET
