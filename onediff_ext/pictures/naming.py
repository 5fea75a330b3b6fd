"""Names of results, from a template such as ``{stem}-{seed}.png``."""

from __future__ import annotations

import datetime
import re
import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from onediff_ext.core.errors import OptionError
from onediff_ext.pictures.urls import exists

DEFAULT_TEMPLATE = "{stem}.png"
FIELDS = ("stem", "name", "index", "seed", "width", "height", "date")

_KNOWN_FIELDS_HINT = "Known fields: " + ", ".join(f"{{{name}}}" for name in FIELDS) + "."
_UNSAFE = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f\ud800-\udfff]')
_WIDE = re.compile(r"\d{3}")
_WINDOWS_DEVICE = re.compile(
    r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *", re.IGNORECASE
)
# File systems allow 255 bytes; the rest is for "-2" and for the unfinished file's suffix.
_MAX_NAME_BYTES = 200


@dataclass(frozen=True)
class NameFacts:
    """The values of a name template's fields.

    Args:
        path: The input, for ``{stem}`` (``cat`` of ``cat.jpg``) and ``{name}``
            (``cat.jpg``).
        index: The input's number, for ``{index}``.
        seed: For ``{seed}``.
        width_px, height_px: The result's size, for ``{width}`` and ``{height}``.
        date: For ``{date}``, written as 2024-12-31.
    """

    path: Path
    index: int
    seed: int
    width_px: int
    height_px: int
    date: datetime.date

    def fields(self) -> dict[str, str | int]:
        """Return the values of `FIELDS`; the texts are safe in file names."""
        return {
            "stem": _safe(self.path.stem),
            "name": _safe(self.path.name),
            "index": self.index,
            "seed": self.seed,
            "width": self.width_px,
            "height": self.height_px,
            "date": self.date.isoformat(),
        }


class NameTemplate:
    """A checked template for names.

    Args:
        text: File name with fields in braces; Python's format codes work, as in
            ``{index:04d}``. A slash makes a subfolder, as in ``{date}/{stem}``.
            A missing ``.png`` is added.

    Raises:
        OptionError: The template has an unknown field, is malformed, or leads out of
            the output folder.
    """

    def __init__(self, text: str = DEFAULT_TEMPLATE) -> None:
        self.text = text
        _check_fields(text)
        parts = PurePosixPath(text.replace("\\", "/")).parts
        if not parts or parts[0] == "/" or ".." in parts or ":" in parts[0].split("{")[0]:
            raise OptionError(
                f'The name template "{text}" leads out of the output folder.',
                "Use a name without .. and without a leading slash or drive.",
            )
        self.render(_EXAMPLE)

    def render(self, facts: NameFacts) -> str:
        """Return a name: relative, with forward slashes, ending in ``.png``."""
        try:
            rendered = self.text.replace("\\", "/").format(**facts.fields())
        except (ValueError, KeyError, IndexError, OverflowError) as exc:
            raise OptionError(
                f'The name template "{self.text}" cannot be used ({exc}).', _KNOWN_FIELDS_HINT
            ) from exc
        *folders, name = rendered.split("/")
        stem = name[: -len(".png")] if name.lower().endswith(".png") else name
        parts = [_safe(folder) for folder in folders if folder not in ("", ".")]
        return "/".join([*parts, _safe(stem) + ".png"])


def distinct_names(names: Sequence[str]) -> list[str]:
    """Make names distinct, also on disks that ignore case.

    The first of several equal names stays as it is. The others get ``-2``, ``-3`` and so on in
    input order; numbers that lead to another input's name are left out.
    """
    claimed = {_folded(name) for name in names}
    used: set[str] = set()
    distinct = []
    for name in names:
        chosen, number = name, 1
        while _folded(chosen) in used or (number > 1 and _folded(chosen) in claimed):
            number += 1
            chosen = numbered(name, number)
        used.add(_folded(chosen))
        distinct.append(chosen)
    return distinct


def numbered(name: str, number: int) -> str:
    """Return ``a-2.png`` for ``a.png`` and 2."""
    stem, dot, ending = name.rpartition(".")
    return f"{stem}-{number}{dot}{ending}"


def free_path(path: Path) -> Path:
    """Return a path that does not exist yet: `path`, or ``a-2.png``, ``a-3.png`` and so on."""
    number, free = 1, path
    while exists(free):
        number += 1
        free = path.with_name(numbered(path.name, number))
    return free


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _safe(text: str) -> str:
    """Replace characters that some file system refuses; the result is never empty."""
    cleaned = _UNSAFE.sub("_", unicodedata.normalize("NFC", text)).strip(" ")
    cleaned = cleaned.encode("utf-8")[:_MAX_NAME_BYTES].decode("utf-8", "ignore").rstrip(" .")
    if cleaned.startswith("."):
        cleaned = "_" + cleaned[1:]  # searches ignore hidden files
    if _WINDOWS_DEVICE.fullmatch(cleaned.split(".")[0]):
        cleaned = "_" + cleaned
    return cleaned or "_"


def _check_fields(text: str) -> None:
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as exc:
        raise OptionError(
            f'The name template "{text}" has a brace too many or too few ({exc}).',
            _KNOWN_FIELDS_HINT,
        ) from exc
    for _, field, spec, _ in parts:
        if field is None:
            continue
        if "{" in (spec or "") or _WIDE.search(spec or ""):
            # "{index:999999999}" would take a gigabyte of memory
            raise OptionError(
                f'The name template "{text[:80]}" asks for too wide a field.', _KNOWN_FIELDS_HINT
            )
        if field not in FIELDS:
            raise OptionError(
                f'The name template "{text}" has an unknown field "{{{field}}}".',
                _KNOWN_FIELDS_HINT,
            )


_EXAMPLE = NameFacts(Path("cat.jpg"), 0, 0, 512, 512, datetime.date(2024, 12, 31))
