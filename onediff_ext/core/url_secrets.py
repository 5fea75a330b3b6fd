"""Hides passwords of URLs in texts that people and files get to see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# A `pathlib.Path` of a URL has one slash, which Windows turns round. A drive has one letter.
_URL = re.compile(r"\b(?P<scheme>[a-z][a-z0-9+.-]+:[/\\]+)(?P<rest>(?:(?!::)\S)+)", re.IGNORECASE)
_SECRET_IN_QUERY = re.compile(
    r"([?&][^=&\s]*(?:token|sig|secret|passw|pwd|key|credential|auth)[^=&\s]*=)[^&#\s]+",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """Return a text with ``***`` for the passwords, keys and signatures of the URLs in it.

    Args:
        text: Such as a message or a path: "ftp://me:secret@host/a" becomes "ftp://me:***@host/a".
    """
    return _URL.sub(_hidden, text) if ":" in text else text


def without_secrets_in(value: Any) -> Any:
    """Return plain values for JSON in which `without_secrets` was applied to each text."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {name: without_secrets_in(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets_in(entry) for entry in value]
    return value


def _hidden(found: re.Match[str]) -> str:
    rest = found["rest"]
    place = re.split(r"[/\\?#]", rest, maxsplit=1)[0]
    end = place.rfind("@")
    user, colon, secret = (place[:end] if end >= 0 else place).partition(":")
    if end < 0 and colon and "@" in rest and not secret.isdecimal():
        end = rest.index("@")  # a key with a slash in it; a decimal number is a port
        secret = rest[len(user) + 1 : end]
    if end >= 0 and colon and secret:
        rest = f"{user}:{HIDDEN}{rest[end:]}"
    return found["scheme"] + _SECRET_IN_QUERY.sub(rf"\g<1>{HIDDEN}", rest)
