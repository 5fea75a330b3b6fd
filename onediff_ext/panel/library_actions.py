"""The actions of the panel's graph library; each returns its result in words."""

from __future__ import annotations

import datetime
import os
from collections import Counter
from pathlib import Path

from onediff_ext.core.errors import OptionError
from onediff_ext.panel import phrases
from onediff_ext.panel.graph_rows import EVERYTHING, digests_of, size_text
from onediff_ext.panel.phrases import ENGLISH, Phrases
from onediff_ext.store import CheckpointRecords, GraphLibrary

_SUFFIX = ".onediff-graphs.zip"
_SHOWN_FILES = 5
# What was done about a file, as `StoreProblem.remedy` names it.
_DONE = {
    "deleted": phrases.FILES_DELETED,
    "moved back": phrases.FILES_MOVED,
    "written again": phrases.FILES_WRITTEN,
    "": phrases.FILES_LEFT,
}


def verify(library: GraphLibrary, words: Phrases = ENGLISH) -> str:
    """Check every byte of every graph and whether each record can be read, and mend the store.

    Damaged files, and graphs that others may have written, are deleted; a damaged
    `schema.json` is written again, and misplaced graphs are moved back. Files of other
    versions stay. The first files are named, each in a line with what is wrong with it.

    Raises:
        StoreError: The store cannot be read, or not be mended.
    """
    count = len(library.entries())
    problems = library.verify(repair=True)
    if not problems:
        return words.say(phrases.CHECKED, n=count)
    remedies = Counter(problem.remedy for problem in problems)
    lines = [words.say(_DONE[remedy], n=n) for remedy, n in remedies.items()]
    for problem in problems[:_SHOWN_FILES]:
        lines.append(f"{_short(problem.path.name)}: {words.translated(problem.reason)}")
    if len(problems) > _SHOWN_FILES:
        lines.append(words.say(phrases.FURTHER_FILES, n=len(problems) - _SHOWN_FILES))
    return "\n".join(lines)


def delete(library: GraphLibrary, name: str, words: Phrases = ENGLISH) -> str:
    """Delete the graphs under a name of the table.

    Raises:
        StoreError: The folder cannot be written.
    """
    digests = digests_of(library, name)
    sizes = {graph.digest: graph.size_bytes for graph in library.entries()}
    freed = sum(sizes.get(digest, 0) for digest in digests if library.delete(digest))
    records = CheckpointRecords(library.folder)
    for listing in records.list():
        if len(listing.missing) == len(listing.record.kinds):
            records.delete(listing.record.content_hash)
    return words.say(phrases.DELETED, n=len(digests), size=size_text(freed))


def export(library: GraphLibrary, name: str, folder: Path) -> Path:
    """Write the graphs under a name of the table into an archive in a folder.

    Returns:
        The archive.

    Raises:
        OptionError: There is nothing to export.
        StoreError: The archive cannot be written.
    """
    digests = digests_of(library, name)
    if not digests:
        raise OptionError("There are no graphs to export.", "Press Build now first.")
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    what = "all" if name == EVERYTHING else "".join(c if c.isalnum() else "-" for c in name)
    path = folder / f"{what}-{now}{_SUFFIX}"
    library.export(path, digests)
    return path


def import_archive(
    library: GraphLibrary,
    path: str | os.PathLike[str] | None,
    trust: bool,
    words: Phrases = ENGLISH,
) -> str:
    """Import the graphs of an archive that the user chose.

    Raises:
        OptionError: No file was chosen.
        UntrustedGraphError: The user has not confirmed trust in the graphs.
        StoreError: The archive is damaged, or the store cannot be written.
    """
    if not path:
        raise OptionError("No file is chosen.", "Choose an exported archive.")
    report = library.import_archive(Path(path), trust=trust)
    template = phrases.IMPORTED_SOME if report.kept else phrases.IMPORTED
    return words.say(template, n=len(report.imported), kept=len(report.kept))


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:12]}…"
