"""The panel's own HTML. Every text goes through `escape`, because names come from files."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from html import escape as escape_html
from pathlib import Path

from onediff_ext.core.errors import OneDiffError
from onediff_ext.core.records import ORIGIN_IMPORTED
from onediff_ext.core.words import times_faster
from onediff_ext.panel import phrases
from onediff_ext.panel.graph_rows import GraphGroup, age_text, size_text
from onediff_ext.panel.header import Header
from onediff_ext.panel.phrases import Phrases
from onediff_ext.panel.saved_text import saved_note
from onediff_ext.store import StoredGraph


def escape(text: str) -> str:
    """A text as HTML. Lone surrogates, which file names may have, become question marks."""
    return escape_html(text.encode("utf-8", "replace").decode("utf-8"))


@functools.cache
def style_sheet() -> str:
    """The style sheet of this HTML."""
    path = Path(__file__).resolve().parent.parent / "assets" / "panel.css"
    return path.read_text(encoding="utf-8")


def style_element() -> str:
    """The style sheet as an element, for pages of other programs."""
    return f"<style>{style_sheet()}</style>"


def header(shown: Header) -> str:
    """The header's text with its coloured dot; a tooltip has what a narrow header cuts."""
    gain = "" if shown.gains else ' data-gain="none"'
    return (
        f'<span class="onediff-status" data-state="{shown.headline.value}"{gain}'
        f' title="{escape(shown.text)}"><span class="onediff-dot"></span>'
        f'<span class="onediff-text">{escape(shown.text)}</span></span>'
    )


def details(notes: Sequence[str], lines: Sequence[str]) -> str:
    """The lines beneath the header; notes about the machine come first."""
    parts = [f'<p class="onediff-note">{escape(text)}</p>' for text in notes]
    parts += [f'<p class="onediff-line">{escape(text)}</p>' for text in lines]
    return "".join(parts)


def technical(lines: Sequence[str]) -> str:
    """The engine's own texts as a list."""
    if not lines:
        return '<p class="onediff-note">Nothing to explain.</p>'
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="onediff-why">{items}</ul>'


def progress_bar(share: float, text: str) -> str:
    """A bar with a text.

    Args:
        share: How much is done, 0 to 1.
        text: What goes on; without it there is no bar.
    """
    if not text:
        return ""
    return (
        f'<div class="onediff-bar" title="{escape(text)}"><i style="width:{100 * share:.0f}%"></i>'
        f"<span>{escape(text)}</span></div>"
    )


def message(text: str, words: Phrases = phrases.ENGLISH) -> str:
    """A message about something that was done.

    Args:
        text: A sentence; several in lines.
        words: The language.
    """
    lines = "\n".join(words.translated(line) for line in text.splitlines())
    return f'<div class="onediff-message">{escape(lines)}</div>' if text else ""


def error(exc: OneDiffError, words: Phrases = phrases.ENGLISH) -> str:
    """A message about something that failed, and what to do next, in a language."""
    return f'<div class="onediff-message onediff-bad">{escape(words.translated(str(exc)))}</div>'


def graph_table(groups: Sequence[GraphGroup], root: Path, limit_bytes: int, words: Phrases) -> str:
    """The graph library by checkpoint; a checkpoint's row opens to its graphs."""
    if not groups:
        return (
            '<div class="onediff-note">No graphs yet. They are built when pictures are drawn, '
            "or by a warm-up.</div>"
        )
    rows = "".join(_row(group, words) for group in groups)
    distinct = {graph.digest: graph.size_bytes for group in groups for graph in group.graphs}
    total = words.say(
        phrases.IN_STORE,
        n=len(distinct),
        size=size_text(sum(distinct.values())),
        limit=f"{limit_bytes / 2**30:.3g}",
        folder=root,
    )
    return (
        '<div class="onediff-scroll"><table class="onediff-graphs"><thead><tr>'
        '<th>Checkpoint</th><th class="n">Graphs</th><th class="n">Size</th>'
        '<th class="n">Built</th><th class="n">Last used</th><th class="n">Speed-up</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
        f'<div class="onediff-note">{escape(total)}</div>'
    )


def _row(group: GraphGroup, words: Phrases) -> str:
    label = escape(group.name)
    if group.architecture:
        label += f' <span class="onediff-note">{escape(group.architecture)}</span>'
    items = "".join(f"<li>{escape(_graph_text(graph, words))}</li>" for graph in group.graphs)
    notes = "<br>".join(map(escape, _notes(group, words)))
    if notes:
        notes = f'<tr class="onediff-notes"><td colspan="6">{notes}</td></tr>'
    speedup = "<br>".join(escape(text) for text in _speedups(group, words)) or "–"
    return (
        f"<tr><td><details><summary>{label}</summary><ul>{items}</ul></details></td>"
        f'<td class="n">{len(group.graphs)}</td><td class="n">{size_text(group.size_bytes)}</td>'
        f'<td class="n">{escape(age_text(group.built_at, words))}</td>'
        f'<td class="n">{escape(age_text(group.used_at, words))}</td>'
        f'<td class="n">{speedup}</td></tr>{notes}'
    )


def _speedups(group: GraphGroup, words: Phrases) -> list[str]:
    """The measured figure of each size, named where there are several."""
    texts = []
    for size, speedup in group.speedups:
        times = times_faster(speedup)
        text = words.say(phrases.NO_GAIN_ROW) if times is None else f"{times}x"
        texts.append(text if len(group.speedups) == 1 else f"{size}: {text}")
    return texts


def _graph_text(graph: StoredGraph, words: Phrases) -> str:
    """A graph's label, backend, size, build time, and whether it was imported."""
    header = graph.header
    took = words.say(phrases.BUILT_IN, time=words.duration(header.build_seconds, tenths=True))
    parts = [header.backend, size_text(graph.size_bytes), took]
    if header.origin == ORIGIN_IMPORTED:
        parts.append(words.say(phrases.IMPORTED_GRAPH))
    return f"{graph.label} – {', '.join(parts)}"


def _notes(group: GraphGroup, words: Phrases) -> list[str]:
    """What stands beneath a checkpoint's name."""
    if not group.architecture:  # graphs of no checkpoint
        return []
    notes = [saved_note(group.saved, group.speedup is not None, words)]
    if group.missing:
        notes.append(words.say(phrases.MORE_GRAPHS, n=group.missing))
    return notes
