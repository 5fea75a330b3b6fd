"""Paths as people type or paste them into a field, or pass them to a function."""

from __future__ import annotations

import os
from pathlib import Path

from onediff_ext.core.errors import OptionError
from onediff_ext.core.words import typed

_QUOTES = ('"', "'")


def typed_path(text: str | None) -> Path | None:
    """Return the path that somebody has typed.

    Spaces around it are left out, and so are quotes: Explorer's *Copy as path* adds them. A path
    with quotes in its name is taken as it is if it exists. ``~`` stands for the user's folder.

    Args:
        text: What the field holds.

    Returns:
        None if the field is empty.
    """
    text = (text or "").strip()
    if text[:1] in _QUOTES and text[-1:] == text[:1] and not _path(text).exists():
        text = text[1:-1].strip()
    return _path(text) if text else None


def given_path(value: object, what: str) -> Path:
    """Return the path that a function was given.

    Args:
        value: A text or a path; ``~`` stands for the user's folder.
        what: Names the argument in messages, such as "store".

    Raises:
        OptionError: It is neither.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise OptionError(f"{typed(value)} is no path for `{what}`.", "Pass a text or a Path.")
    return _path(text)


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # there is no user of this name
        return Path(text)
