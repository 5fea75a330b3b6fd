"""What stands beneath the header: what the last picture gained, and why it was not faster."""

from __future__ import annotations

from collections.abc import Sequence

from onediff_ext.core.headline import Headline, headline
from onediff_ext.core.status import Status
from onediff_ext.core.words import counted
from onediff_ext.panel import phrases
from onediff_ext.panel.phrases import Phrases
from onediff_ext.panel.reasons import PlainReason

_SHOWN_REASONS = 4


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
    lines = [_took(status, words)]
    if status.building or (status.running == "off" and not has_graphs):
        lines.append(_first_time(status, words))
    if status.paused and status.waiting:
        lines.append(words.say(phrases.ON_HOLD, n=status.waiting))
    elif state in (Headline.WITHOUT, Headline.PART) and status.running != "off":
        template = phrases.PART_WITHOUT if state is Headline.PART else phrases.ALL_WITHOUT
        for reason in reasons[:_SHOWN_REASONS]:
            lines.append(f"{words.say(template, why=reason.why)} {reason.advice}")
    lines += [status.problem, status.substituted, status.deepcache, *status.notes]
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


def _took(status: Status, words: Phrases) -> str:
    if status.picture_s is None:
        return ""
    took = words.duration(status.picture_s, tenths=True)
    if status.without_s is None:
        return words.say(phrases.TOOK_ONLY, took=took)
    without = words.duration(status.without_s, tenths=True)
    return words.say(phrases.TOOK, took=took, without=without)


def _first_time(status: Status, words: Phrases) -> str:
    """The sentence for a machine that lacks graphs, with a time where one is known."""
    if status.first_builds_s is None:
        return words.say(phrases.FIRST_TIME)
    return words.say(phrases.FIRST_TIME_FOR, time=words.duration(status.first_builds_s))
