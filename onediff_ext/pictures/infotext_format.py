"""The format of infotext: how an image was made, as text that the WebUI reads back.

    a cat, watercolour
    Negative prompt: blurry
    Steps: 20, Sampler: Euler a, Seed: 1, Size: 512x768, Version: v1.10.1

The format is AUTOMATIC1111's, which has no document; the reader that counts is
`modules/infotext_utils.py` there. Its limits are the format's: each line of a prompt is
trimmed, and a line of it that begins with "Negative prompt:" starts the negative prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from onediff_ext.core.errors import OptionError

_NEGATIVE = "Negative prompt:"
_FIRST_FIELD = "Steps:"
_NAME = re.compile(r"\w[\w /-]{1,100}")
_ENTRY = re.compile(rf'({_NAME.pattern}):\s*("(?:\\.|[^\\"])*"(?=\s*(?:,|$))|[^,]*)(?:,|$)')
_NEEDS_QUOTES = re.compile(r'[,:\x00-\x1f\x85\u2028\u2029]|^\s|\s$|^"|^$')
_MIN_FIELDS = 3
_MAX_FIELDS_CHARS = 65_536
"""A last line longer than this is no list of fields."""


@dataclass(frozen=True)
class Infotext:
    """An infotext's parts.

    Args:
        prompt, negative_prompt: May have several lines.
        fields: Name → value, in order, such as ``{"Steps": "20", "Size": "512x768"}``.
    """

    prompt: str = ""
    negative_prompt: str = ""
    fields: dict[str, str] = field(default_factory=dict)


def build_infotext(
    prompt: str, negative_prompt: str = "", fields: Mapping[str, object] | None = None
) -> str:
    """Write an infotext.

    Args:
        prompt, negative_prompt: As the user gave them.
        fields: Name → value, in the order wanted, ``Steps`` first; None values are
            left out. A value that the format could misread is written as a JSON text.

    Raises:
        OptionError: A field's name has other characters than letters, digits, spaces,
            ``_``, ``-`` and ``/``, fewer than two or more than 101.
    """
    entries = []
    for name, value in (fields or {}).items():
        if not _NAME.fullmatch(name) or name != name.strip():
            raise OptionError(
                f'"{name}" cannot be the name of an infotext field.',
                "Use two or more letters, digits, spaces, hyphens or slashes.",
            )
        if value is not None:
            entries.append(f"{name}: {_quoted(str(value))}")
    negative = _as_read(_trimmed(negative_prompt))
    lines = [_trimmed(prompt), f"{_NEGATIVE} {negative}" if negative else "", ", ".join(entries)]
    text = "\n".join(line for line in lines if line)
    # A prompt that ends like a list of fields is none when another line follows.
    return text if entries or _entries_of(text) is None else f"{text}\n{_NEGATIVE}"


def parse_infotext(text: str) -> Infotext:
    """Read an infotext, ours or the WebUI's. Any text is one: at worst all prompt."""
    lines, entries = _trimmed(text).split("\n"), _entries_of(text)
    if entries is not None:
        lines.pop()
    prompts: tuple[list[str], list[str]] = ([], [])
    is_negative = False
    for line in lines:
        line = line.strip()
        if line.startswith(_NEGATIVE):
            is_negative, line = True, line[len(_NEGATIVE) :]
        prompts[is_negative].append(line.strip())
    return Infotext(
        "\n".join(prompts[False]).strip(),
        "\n".join(prompts[True]).strip(),
        {name: _unquoted(value) for name, value in entries or ()},
    )


def _entries_of(text: str) -> list[tuple[str, str]] | None:
    """The (name, value) pairs of an infotext's last line; None when it is no list of fields."""
    last = _trimmed(text).rpartition("\n")[2]
    entries: list[tuple[str, str]] = _ENTRY.findall(last) if len(last) <= _MAX_FIELDS_CHARS else []
    is_list = len(entries) >= _MIN_FIELDS or last.startswith(_FIRST_FIELD)
    return entries if is_list else None


def _trimmed(text: str) -> str:
    return text.replace("\r\n", "\n").strip()


def _as_read(negative: str) -> str:
    """A negative prompt without what readers drop: the format's own words before its further
    lines."""
    first, *more = negative.split("\n")
    return "\n".join([first, *map(_without_words, more)]).strip()


def _without_words(line: str) -> str:
    while (stripped := line.strip()).startswith(_NEGATIVE):
        line = stripped[len(_NEGATIVE) :].strip()
    return line


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if _NEEDS_QUOTES.search(value) else value


def _unquoted(value: str) -> str:
    if len(value) < 2 or value[0] != '"' or value[-1] != '"':
        return value
    try:
        unquoted = json.loads(value)
    except ValueError:
        return value
    return str(unquoted)
