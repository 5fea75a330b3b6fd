"""The panel's own pieces of HTML. Every text goes through `escape`: names come from files."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from html import escape as escape_html
from pathlib import Path

from onediff_ext.core.errors import OneDiffError
from onediff_ext.core.status import Status
from onediff_ext.core.words import counted
from onediff_ext.panel.graph_rows import GraphGroup, age_text, size_text
from onediff_ext.panel.panel_host import WarmUpStep

_SHOWN_REASONS = 4


def escape(text: str) -> str:
    """A text as HTML. What UTF-8 lacks is replaced: names of files may have it, answers may not."""
    return escape_html(text.encode("utf-8", "replace").decode("utf-8"))


@functools.cache
def style_sheet() -> str:
    """The style sheet that these pieces need."""
    path = Path(__file__).resolve().parent.parent / "assets" / "panel.css"
    return path.read_text(encoding="utf-8")


def style_element() -> str:
    """The style sheet as an element, for hosts whose page is not ours."""
    return f"<style>{style_sheet()}</style>"


def status_line(status: Status, wanted: bool = False) -> str:
    """A coloured dot and the one line.

    Args:
        status: What is true now.
        wanted: OneDiff is ticked here; the last picture may have been drawn otherwise.
    """
    state, line = "building" if status.building else status.running, status.line()
    if status.running == "off" and wanted:
        state, line = "waiting", "on, nothing drawn with it yet"
    elif not wanted and not status.building:
        state, line = "off", "off"
    return (
        f'<span class="onediff-status" data-state="{escape(state)}">'
        f'<span class="onediff-dot"></span><span>{escape(line)}</span></span>'
    )


def status_details(status: Status, note: str | None = None) -> str:
    """What the line has no room for: a note, and why something runs eager although it is on."""
    parts = [f'<div class="onediff-note">{escape(note)}</div>'] if note else []
    # The first reason is in the line already, unless graphs are in use or being made.
    in_line = not status.building and status.running != "compiled"
    reasons = status.reasons[1:] if in_line else status.reasons
    if reasons:
        items = "".join(f"<li>{escape(reason)}</li>" for reason in reasons[:_SHOWN_REASONS])
        if len(reasons) > _SHOWN_REASONS:
            items += f"<li>and {len(reasons) - _SHOWN_REASONS} more</li>"
        parts.append(f'<ul class="onediff-why">{items}</ul>')
    return "".join(parts)


def progress_bar(step: WarmUpStep) -> str:
    """How far a warm-up is."""
    part = 100 * step.done / step.needed if step.needed else 0
    numbers = f"{step.done} of {step.needed}: " if step.needed else ""
    left = "" if step.seconds_left is None else f" ({duration(step.seconds_left)} left)"
    return (
        f'<div class="onediff-bar"><i style="width:{part:.0f}%"></i>'
        f"<span>{escape(numbers + step.note + left)}</span></div>"
    )


def message(text: str) -> str:
    """Something that was done."""
    return f'<div class="onediff-message">{escape(text)}</div>' if text else ""


def error(exc: OneDiffError) -> str:
    """Something that could not be done, and what to do next."""
    return f'<div class="onediff-message onediff-bad">{escape(str(exc))}</div>'


def graph_table(groups: Sequence[GraphGroup], root: Path, limit_bytes: int) -> str:
    """The graph library by checkpoint; a checkpoint's row opens to its graphs."""
    if not groups:
        return (
            '<div class="onediff-note">No graphs yet. They are made when pictures are drawn, '
            "or by warming up.</div>"
        )
    rows = "".join(_row(group) for group in groups)
    distinct = {graph.digest: graph.size_bytes for group in groups for graph in group.graphs}
    total = f"{counted(len(distinct), 'graph')}, {size_text(sum(distinct.values()))}"
    return (
        '<div class="onediff-scroll"><table class="onediff-graphs"><thead><tr>'
        '<th>Checkpoint</th><th class="n">Graphs</th><th class="n">Size</th>'
        '<th class="n">Built</th><th class="n">Last used</th><th class="n">Speed-up</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
        f'<div class="onediff-note">{total} of {limit_bytes / 2**30:.3g} GB in '
        f"{escape(str(root))}. Graphs that serve several checkpoints count once.</div>"
    )


def duration(seconds: float) -> str:
    """``"18 s"`` or ``"3 min"``."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _row(group: GraphGroup) -> str:
    label = escape(group.name)
    if group.architecture:
        label += f' <span class="onediff-note">{escape(group.architecture)}</span>'
    items = "".join(
        f"<li>{escape(graph.label)} – {escape(graph.header.backend)}, "
        f"{size_text(graph.size_bytes)}, {graph.header.build_seconds:.1f} s to build"
        f"{', imported' if graph.header.origin == 'imported' else ''}</li>"
        for graph in group.graphs
    )
    counts = str(len(group.graphs))
    if group.missing:
        counts += f" ({group.missing} missing)"
    speedup = "–" if group.speedup is None else f"{group.speedup:.1f}x"
    return (
        f"<tr><td><details><summary>{label}</summary><ul>{items}</ul></details></td>"
        f'<td class="n">{counts}</td><td class="n">{size_text(group.size_bytes)}</td>'
        f'<td class="n">{age_text(group.built_at)}</td><td class="n">{age_text(group.used_at)}</td>'
        f'<td class="n">{speedup}</td></tr>'
    )
