"""What stands beneath the header: what the last picture gained, and why it was not faster."""

from __future__ import annotations

import re
from collections.abc import Sequence

from onediff_ext.core.headline import Headline, headline
from onediff_ext.core.status import Status
from onediff_ext.core.words import LEAST_GAIN, counted
from onediff_ext.panel import phrases
from onediff_ext.panel.phrases import Phrases
from onediff_ext.panel.reasons import PlainReason
from onediff_ext.panel.saved_text import saved_text
from onediff_ext.store import SavedTime

_SHOWN_REASONS = 4
_OF_BUILDS = re.compile("builds were cancelled|builds are paused|none may be built")


def detail_lines(
    status: Status,
    wanted: bool,
    reasons: Sequence[PlainReason],
    words: Phrases,
    *,
    has_graphs: bool = False,
) -> list[str]:
    """Return the lines beneath the header, the most useful first; none while OneDiff is off.

    A line changes only when something has happened: a page that asks every two seconds keeps
    what its user has selected or opened.

    Args:
        status: The status.
        wanted: Whether OneDiff is ticked.
        reasons: The eager reasons in plain words.
        words: The language.
        has_graphs: Whether the store has graphs already, before the first picture.
    """
    state = headline(status, wanted)
    if state is Headline.OFF:
        return []
    lines = [_took(status, state, words), _saved(status, words)]
    if (status.building and not status.paused) or (status.running == "off" and not has_graphs):
        lines.append(_first_time(status, words))
    if status.paused:
        left = status.kinds_needed - status.kinds_ready - status.kinds_failed
        lines.append(words.say(phrases.ON_HOLD if left else phrases.PAUSED, n=left))
    elif status.cancelled and status.waiting and state is not Headline.GRAPHS:
        lines.append(words.say(phrases.ON_CANCEL))
    elif wanted and state is not Headline.GRAPHS and status.running != "off":
        why = _why_eager(status, state, reasons, words)
        # While graphs are built the header has no room for the reason.
        lines = why + lines if state is Headline.BUILDING else lines + why
    speed_ups = (status.deepcache, status.guidance)
    more = [status.problem, status.substituted, *speed_ups, *status.notes]
    lines += [words.translated(line) for line in more]
    return list(dict.fromkeys(line for line in lines if line))


def technical_lines(status: Status) -> list[str]:
    """Return the engine's own texts: each reason, with its blocks and the extension behind it."""
    lines = []
    for reason in dict.fromkeys([*status.reasons, *(text for text, _ in status.eager_blocks)]):
        counts = [counted(count, "block") for text, count in status.eager_blocks if text in reason]
        names = [f"by {name}" for text, name in status.changed_by if text in reason]
        more = ", ".join([*counts, *names])
        lines.append(f"{reason} ({more})" if more else reason)
    # A reason with its kind of block says more than the same reason alone.
    return [line for line in lines if not any(line in other for other in lines if other != line)]


def _why_eager(
    status: Status, state: Headline, reasons: Sequence[PlainReason], words: Phrases
) -> list[str]:
    """Why blocks ran without graphs, and what to do about it."""
    is_part = state is Headline.PART
    if state is Headline.BUILDING:
        reasons = [reason for reason in reasons if not _OF_BUILDS.search(reason.technical)]
        told = " ".join(reason.technical for reason in reasons)
        blocks = sum(count for text, count in status.eager_blocks if text in told)
        is_part = status.blocks_compiled > 0 or 0 < blocks < status.blocks_needed
    template = phrases.PART_WITHOUT if is_part else phrases.ALL_WITHOUT
    return [
        f"{words.say(template, why=reason.why)} {reason.advice}"
        for reason in reasons[:_SHOWN_REASONS]
    ]


def _took(status: Status, state: Headline, words: Phrases) -> str:
    """What the last picture took and what graphs saved, or how to have that measured."""
    if status.picture_s is None:
        return ""
    took = words.duration(status.picture_s, tenths=True)
    if status.without_s is None:
        text = words.say(phrases.TOOK_ONLY, took=took)
        may_gain = state in (Headline.GRAPHS, Headline.PART) or status.captures
        how = phrases.DRAW_AGAIN if status.size_is_measured else phrases.MEASURE_IT
        how = phrases.OTHER_PACE if status.other_pace else how
        return f"{text} {words.say(how)}" if may_gain else text
    without = words.duration(status.without_s, tenths=True)
    saved_s = status.without_s - status.picture_s
    if status.without_s < LEAST_GAIN * status.picture_s:
        return words.say(phrases.TOOK_AS_LONG, took=took, without=without)
    saved = words.duration(saved_s, tenths=True)
    return words.say(phrases.TOOK, took=took, without=without, saved=saved)


def _saved(status: Status, words: Phrases) -> str:
    """The time that graphs have saved so far with this checkpoint."""
    if status.saved_s is None or status.saved_since is None:
        return ""
    return saved_text(
        SavedTime(status.saved_s, 0, status.saved_since), words, template=phrases.SAVED_TOTAL
    )


def _first_time(status: Status, words: Phrases) -> str:
    """The sentence for a machine that lacks graphs, with a time where one is known."""
    if status.first_builds_s is None:
        return words.say(phrases.FIRST_TIME_BUSY if status.building else phrases.FIRST_TIME)
    return words.say(phrases.FIRST_TIME_FOR, time=words.duration(status.first_builds_s))
