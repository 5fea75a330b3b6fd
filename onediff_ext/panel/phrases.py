"""The panel's own sentences, and their translations.

A WebUI translates a text that stands on its page word for word. These sentences have numbers and
names in them, so the panel translates them itself, with the same files.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path

from onediff_ext.panel.messages import patterns

_LONGEST_CHARS = 2000  # of a message that is compared with the templates
LOCALIZATIONS = Path(__file__).resolve().parents[2] / "localizations"

# The header.
OFF = "off"
WITHOUT = "without graphs"
BUILDING = "building {done} of {needed} graphs"
PAUSED_AT = "paused at {done} of {needed} graphs"
LOOKING = "looking for graphs"
NEXT_IN_LINE = "waiting for its turn"
PREPARING = "preparing size {number} of {needed}"
MEASURING = "measuring size {number} of {needed}"
GRAPHS = "graphs"
PART = "graphs in part"
LEFT = ", about {time} left"
FIRST_TAKES = ", the first takes about {time}"
SO_FAR = ", for {time} so far"
SPEEDUP = ", {times}x"
NO_GAIN = ", no gain measured"
BLOCKS = ", {done} of {needed} blocks"
WHY = ": {why}"
WHY_IN_BRACKETS = " ({why})"
SECONDS, MINUTES, HOURS = "{n} s", "{n} min", "{h} h {m} min"

# Below it.
NO_PICTURE_YET = "no picture drawn with OneDiff yet"
NOT_BUILT_YET = "graphs are not built yet"
CUDA_GRAPHS_ONLY = "CUDA graphs only"
TOOK = "Last picture: {took}, about {without} without OneDiff: saved {saved} (estimated)."
TOOK_AS_LONG = "Last picture: {took}, about {without} without OneDiff: no time saved (estimated)."
TOOK_ONLY = "Last picture: {took}."
MEASURE_IT = "To see the time saved, add this size to the warm-up sizes and press Build now."
DRAW_AGAIN = "This size is measured: the next picture shows the time saved."
OTHER_PACE = "Time saved unknown: the computer was less or more busy when this size was measured."
SAVED_TOTAL = "With this checkpoint, graphs saved {time} since {day}."
FIRST_TIME = "Graphs are built once, in the background. Pictures come meanwhile."
FIRST_TIME_BUSY = (
    "Graphs are built once, in the background; beside pictures and other programs that takes "
    "longer. Pictures come meanwhile."
)
FIRST_TIME_FOR = "Graphs are built once, in the background: about {time}. Pictures come meanwhile."
ON_HOLD = "Builds are paused. Graphs left to build: {n}. Press Go on to have them built."
PAUSED = "Builds are paused. Press Go on to end that."
ON_CANCEL = "Builds were cancelled. The next picture has its missing graphs built."
ALL_WITHOUT = "Pictures are right, but drawn without graphs: {why}."
PART_WITHOUT = "Pictures are right, but part of the model runs without graphs: {why}."
SAVED = "saved {time} since {day}"
NOTHING_SAVED = "no time saved so far"
SAVED_LATER = "saved time: counts from the next picture at a measured size"
SAVED_UNKNOWN = "saved time: press Build now to measure it"
MORE_GRAPHS = "{n} not there yet: built when a picture needs them"
NO_GAIN_ROW = "no gain"
IN_STORE = "Graphs: {n}, {size} of {limit} GB in {folder}. Shared ones count once."
BUILT_IN = "{time} to build"
IMPORTED_GRAPH = "imported"
JUST_NOW, MINUTES_AGO, HOURS_AGO = "just now", "{n} min ago", "{n} h ago"
DAYS_AGO = "{n} days ago"
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TODAY, YESTERDAY = "today", "yesterday"
CHECKED = "Graphs checked: {n}. All are intact."
FILES_DELETED = "Files deleted: {n}."
FILES_MOVED = "Files moved back: {n}."
FILES_WRITTEN = "Files written again: {n}."
FILES_LEFT = "Files left alone: {n}."
FURTHER_FILES = "Further files: {n}."
DELETED = "Graphs deleted: {n}. {size} are free again."
IMPORTED = "Graphs imported: {n}."
IMPORTED_SOME = "Graphs imported: {n}; {kept} were there already."
CHANGED_BY = "{extension} changed the model"
TURN_OFF = "Turn {extension} off for more speed."

TEMPLATES = (
    *(OFF, WITHOUT, BUILDING, PAUSED_AT, LOOKING, NEXT_IN_LINE, PREPARING, MEASURING, GRAPHS, PART),
    *(
        LEFT,
        FIRST_TAKES,
        SO_FAR,
        SPEEDUP,
        NO_GAIN,
        BLOCKS,
        WHY,
        WHY_IN_BRACKETS,
        SECONDS,
        MINUTES,
        HOURS,
    ),
    *(NO_PICTURE_YET, NOT_BUILT_YET, CUDA_GRAPHS_ONLY, TOOK, TOOK_AS_LONG, TOOK_ONLY, MEASURE_IT),
    *(
        DRAW_AGAIN,
        SAVED_TOTAL,
        FIRST_TIME,
        FIRST_TIME_FOR,
        FIRST_TIME_BUSY,
        ON_HOLD,
        PAUSED,
        ON_CANCEL,
        ALL_WITHOUT,
    ),
    *(PART_WITHOUT, SAVED, NOTHING_SAVED, SAVED_LATER, SAVED_UNKNOWN, MORE_GRAPHS, NO_GAIN_ROW),
    *(IN_STORE, BUILT_IN, IMPORTED_GRAPH, JUST_NOW, MINUTES_AGO, HOURS_AGO, DAYS_AGO),
    *(CHECKED, DELETED, IMPORTED, IMPORTED_SOME),
    *(FILES_DELETED, FILES_MOVED, FILES_WRITTEN, FILES_LEFT, FURTHER_FILES),
    *(CHANGED_BY, TURN_OFF, *DAYS, TODAY, YESTERDAY),
)
"""Every sentence of this file, for the test that looks for its translations."""


class Phrases:
    """Writes the sentences in one language.

    Args:
        table: English → translated; what it lacks stays English.
    """

    def __init__(self, table: Mapping[str, str] | None = None) -> None:
        self._table = table or {}

    def say(self, template: str, **values: object) -> str:
        """Return a sentence with its values filled in.

        Args:
            template: One of this module's constants, or a reason of `reasons`.
            values: The values by the names in the template.
        """
        return self._table.get(template, template).format(**values)

    def translated(self, message: str) -> str:
        """Return an English message in this language, also one with values.

        Args:
            message: One of `messages.MESSAGES` with its values filled in, or any other text, which
                stays as it is if the table lacks it.
        """
        found = self._found(message)
        if found is not None:
            return found
        for end in re.finditer(r"(?<=[.!?]) ", message):  # what happened, and what to do
            first = self._found(message[: end.start()])
            if first is not None:
                return f"{first} {self.translated(message[end.end() :])}"
        return message

    def _found(self, message: str) -> str | None:
        """The translation of one message; None where there is none."""
        if not self._table or len(message) > _LONGEST_CHARS:
            return None
        if message in self._table:
            return self._table[message]
        for template, pattern in patterns():
            match = pattern.fullmatch(message)
            if match is not None:
                values = {name: self.translated(text) for name, text in match.groupdict().items()}
                return self.say(template, **values)
        return None

    def duration(self, seconds: float, *, tenths: bool = False) -> str:
        """Return a time such as "0.8 s", "40 s", "3 min" or "3 h 12 min".

        Args:
            seconds: The time.
            tenths: Whether to write a time below ten seconds with one decimal.
        """
        if tenths and seconds < 9.95:
            return self.say(SECONDS, n=f"{seconds:.1f}")
        if seconds < 90:
            return self.say(SECONDS, n=f"{seconds:.0f}")
        minutes = round(seconds / 60)
        if minutes < 90:
            return self.say(MINUTES, n=minutes)
        return self.say(HOURS, h=minutes // 60, m=minutes % 60)


ENGLISH = Phrases()


@functools.cache
def phrases_in(language: str) -> Phrases:
    """Return the phrases in a language of a WebUI; English where we have no translation.

    Args:
        language: The name of the WebUI's localisation, such as ``"ja_JP"`` or ``"zh-Hans"``.
    """
    name = language.strip().replace("-", "_").lower()
    if name.startswith("ja"):
        return _read("ja_JP")
    if name.startswith(("zh_cn", "zh_hans", "zh_sg")) or name == "zh":
        return _read("zh_CN")
    return ENGLISH


def _read(stem: str) -> Phrases:
    try:
        return Phrases(json.loads((LOCALIZATIONS / f"{stem}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):  # installed as a package, without the WebUI's files
        return ENGLISH
