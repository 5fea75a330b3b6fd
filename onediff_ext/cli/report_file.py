"""The JSON file of ``--report``, and the summary at the end of a command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.core.errors import OptionError
from onediff_ext.core.fault_points import reached
from onediff_ext.core.untrusted_files import other_kind
from onediff_ext.core.url_secrets import without_secrets_in
from onediff_ext.core.words import counted, printable

if TYPE_CHECKING:
    from onediff_ext.hosts.diffusers.jobs.run_report import RunReport


def check_report_path(path: Path | None) -> None:
    """Check that a JSON file can be written, before hours of work.

    Raises:
        OptionError: Its folder does not exist or takes no files, or it is a folder, a device, a
            link or the like.
    """
    if path is None:
        return
    if kind := other_kind(path):
        raise OptionError(f"The report {path} cannot be written.", f"That is {kind}: name a file.")
    try:
        os.close(_new_part(path))
        _part(path).unlink()
    except OSError as exc:
        raise _not_written(path, exc) from exc


def write_report(path: Path, report: RunReport) -> None:
    """Write the report as JSON, complete or not at all.

    Raises:
        OptionError: It cannot be written.
    """
    write_json(path, report.as_json())


def write_json(path: Path, value: object) -> None:
    """Write plain values as JSON, complete or not at all, and without passwords of URLs.

    Raises:
        OptionError: The file cannot be written.
    """
    try:
        try:
            with os.fdopen(_new_part(path), "w", encoding="utf-8") as file:
                reached("opened")
                file.write(json.dumps(without_secrets_in(value), indent=1) + "\n")
                file.flush()
                reached("wrote")
                os.fsync(file.fileno())
            reached("synced")
            os.replace(_part(path), path)
            reached("replaced")
        finally:
            _part(path).unlink(missing_ok=True)
    except OSError as exc:
        raise _not_written(path, exc) from exc


def write_what_happened(path: Path | None, report: RunReport) -> None:
    """Write the report of a failed run; an error here is printed, so that the first one stays."""
    if path is None:
        return
    try:
        write_report(path, report)
    except OptionError as exc:
        print(printable(exc.message), file=sys.stderr)


def print_summary(report: RunReport) -> None:
    """Print the counts of graphs, the eager reasons and the skipped inputs."""
    print(
        f"graphs: {report.built} built, {report.loaded} loaded, {report.reused} reused"
        f" at new sizes; {report.recompiles} recompiles"
    )
    print_fallbacks(report.fallbacks)
    print_left_out(report)


def print_fallbacks(fallbacks: Sequence[Mapping[str, Any]]) -> None:
    """Print one line for each eager reason, with its blocks and number of calls."""
    by_reason: dict[str, list[Mapping[str, Any]]] = {}
    for fallback in fallbacks:
        by_reason.setdefault(fallback["reason"], []).append(fallback)
    for reason, same in by_reason.items():
        count = sum(fallback["count"] for fallback in same)
        whats = ", ".join(fallback["what"] for fallback in same)
        print(printable(f"eager ({counted(count, 'call')}), {reason}: {whats}"))


def print_left_out(report: RunReport) -> None:
    """Print the warnings and the skipped inputs."""
    for warning in report.warnings:
        print(printable(f"warning: {warning}"), file=sys.stderr)
    for entry in report.skipped:
        print(printable(f"skipped {entry['input']}: {entry['reason']}"), file=sys.stderr)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _new_part(path: Path) -> int:
    """A descriptor of a new file, never of what somebody has put there, such as a link."""
    _part(path).unlink(missing_ok=True)  # of a run that was killed
    return os.open(_part(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def _not_written(path: Path, exc: OSError) -> OptionError:
    return OptionError(
        f"The report {path} cannot be written ({exc.strerror or exc}).",
        "Name a file in a folder that exists and that you may write to.",
    )
