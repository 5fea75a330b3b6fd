"""The stand-alone page in the language of each visitor's browser."""

from __future__ import annotations

import json
from pathlib import Path

from gradio.context import LocalContext

from onediff_ext.panel.phrases import ENGLISH, LOCALIZATIONS, Phrases, phrases_in

_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_SCRIPT, _OWN_TEXTS = _ASSETS / "page_language.js", _ASSETS / "page_languages.json"


def visitors_phrases() -> Phrases:
    """Return the phrases for the browser whose request is being answered; English without one."""
    request = LocalContext.request.get(None)
    header = "" if request is None else request.headers.get("accept-language") or ""
    return phrases_for(header)


def phrases_for(accept_language: str) -> Phrases:
    """Return the phrases of the first language that a browser prefers and that we have.

    Args:
        accept_language: The header, such as ``"ja,en-US;q=0.7"``; its order counts.
    """
    for entry in accept_language.split(","):
        name = entry.partition(";")[0].strip()
        words = phrases_in(name)
        if words is not ENGLISH or name.lower().startswith("en"):
            return words
    return ENGLISH


def own_texts() -> dict[str, dict[str, str]]:
    """Return the translations of the page's own fixed texts, by language.

    They are apart from the panel's: a WebUI would apply them to its own page.
    """
    found: dict[str, dict[str, str]] = json.loads(_OWN_TEXTS.read_text(encoding="utf-8"))
    return found


def page_script() -> str:
    """Return JavaScript that translates the page's fixed texts in the browser, as a WebUI does."""
    tables = {}
    for language, own in own_texts().items():
        try:
            panel = json.loads((LOCALIZATIONS / f"{language}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # installed as a package, without the WebUI's files
            continue
        # Texts with values are translated by `Phrases`.
        tables[language] = {text: other for text, other in panel.items() if "{" not in text} | own
    script = _SCRIPT.read_text(encoding="utf-8")
    return script.replace("/* tables */ {}", json.dumps(tables))
