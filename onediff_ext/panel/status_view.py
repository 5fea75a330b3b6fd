"""The status as the panel shows it: header, lines beneath it, technical details."""

from __future__ import annotations

from collections.abc import Sequence

from onediff_ext.core.headline import Headline
from onediff_ext.core.status import Status
from onediff_ext.panel import html
from onediff_ext.panel.details import detail_lines, technical_lines
from onediff_ext.panel.header import header_of
from onediff_ext.panel.panel_host import PanelHost
from onediff_ext.panel.progress import progress_share, progress_text
from onediff_ext.panel.reasons import PlainReason, explain, is_about_memory


class StatusView:
    """Shows one panel host's status.

    Args:
        panel_host: The program that draws.
    """

    def __init__(self, panel_host: PanelHost) -> None:
        self._host = panel_host

    def show(self, enabled: bool) -> list[str]:
        """Return the HTML of header, details, technical details and progress bar.

        Args:
            enabled: Whether OneDiff is ticked.
        """
        status, words = self._host.status(), self._host.phrases()
        reasons = self._plain(status)
        header = header_of(status, enabled, reasons[0] if reasons else None, words)
        lines = detail_lines(
            status, enabled, reasons, words, has_graphs=self._has_graphs(status, enabled)
        )
        off_reason = None if enabled else self._host.off_reason()
        notes = [off_reason or self._host.missing_reason(), self._memory_note(status, reasons)]
        technical = technical_lines(status) if header.headline is not Headline.OFF else []
        return [
            html.header(header),
            html.details([words.translated(note) for note in notes if note], lines),
            html.technical(technical),
            html.progress_bar(progress_share(status), progress_text(status, words)),
        ]

    def header(self, enabled: bool) -> str:
        """Return the HTML of the header alone."""
        return self.show(enabled)[0]

    def _plain(self, status: Status) -> list[PlainReason]:
        words, changed_by = self._host.phrases(), dict(status.changed_by)
        plain = [
            explain(reason, words, changed_by, self._host.file_of_module)
            for reason in status.reasons
        ]
        return list({(reason.why, reason.advice): reason for reason in plain}.values())

    def _memory_note(self, status: Status, reasons: Sequence[PlainReason]) -> str | None:
        """What a small GPU has room for: before the first picture, and where memory is short."""
        is_wanted = status.running == "off" or any(map(is_about_memory, reasons))
        return self._host.memory_note() if is_wanted else None

    def _has_graphs(self, status: Status, enabled: bool) -> bool:
        """Whether the store has graphs, asked only where that is shown."""
        return enabled and status.running == "off" and self._host.has_graphs()
