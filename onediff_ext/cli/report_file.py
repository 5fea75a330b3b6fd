"""Writing `--report`, and saying at the end what happened."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from onediff_ext.core.errors import OptionError

if TYPE_CHECKING:
    from onediff_ext.hosts.diffusers.report import RunReport


def check_report_path(path: Path | None) -> None:
    """Refuse a report file that cannot be written, before hours of work.

    Raises:
        OptionError: Its folder does not exist, or it is a folder.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise OptionError(f"The report {path} cannot be written.", "Name a file in a folder.")


def write_report(path: Path, report: RunReport) -> None:
    """Write the report as JSON, whole or not at all.

    Raises:
        OptionError: It cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as exc:
        part.unlink(missing_ok=True)
        raise OptionError(f"The report {path} cannot be written: {exc.strerror}.") from exc


def print_summary(report: RunReport) -> None:
    """One line on graphs, and every reason for which something ran eager or was left out."""
    print(
        f"graphs: {report.built} built, {report.loaded} loaded, {report.reused} reused"
        f" at new sizes; {report.recompiles} recompiles"
    )
    for fallback in report.fallbacks:
        print(f"eager ({fallback['count']} calls): {fallback['what']}: {fallback['reason']}")
    for warning in report.warnings:
        print(f"warning: {warning}")
    for entry in report.skipped:
        print(f"skipped {entry['input']}: {entry['reason']}", file=sys.stderr)
