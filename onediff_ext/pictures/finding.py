"""Finds the images in files and folders."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onediff_ext.core.errors import PictureError, UnsafeFileError
from onediff_ext.pictures.captions import is_caption
from onediff_ext.pictures.formats import FORMAT_OF_SUFFIX, readable_formats
from onediff_ext.pictures.png_chunks import JOB_KEYWORD, read_png
from onediff_ext.pictures.skipped import SkipReport
from onediff_ext.pictures.urls import Entry, entries_of, exists, identity_of, is_folder, is_url

# A walk takes time that grows with the cube of the depth, and calls for each level.
_MAX_DEPTH = 100

SortKey = tuple[tuple[tuple[int, int, str], ...], str]


@dataclass(frozen=True)
class FoundPicture:
    """A file that is worth opening.

    Args:
        path: The file.
        root: The given folder in which it was found; for a given file, its folder.
            ``path.relative_to(root)`` keeps subfolders.
    """

    path: Path
    root: Path


def natural_key(name: str) -> SortKey:
    """Return a key that sorts ``2.png`` before ``10.png``, ignoring case."""
    parts = re.split(r"([0-9]+)", name.casefold())
    numbered = tuple((1, int(p), "") if k % 2 else (0, 0, p) for k, p in enumerate(parts))
    return numbered, name


def find_pictures(
    inputs: Sequence[Path],
    *,
    report: SkipReport,
    recursive: bool = False,
    output_dir: Path | None = None,
) -> list[FoundPicture]:
    """List the images in files and folders.

    A given file is taken with any suffix; in folders the suffix decides. Hidden files and folders
    are ignored. The images of a folder come in natural order, before those of its subfolders.

    Args:
        inputs: Files and folders, in the order wanted.
        report: Gets the files in the folders that are no images.
        recursive: Search subfolders too.
        output_dir: The folder of the results. A search does not enter it. If it is an input
            itself, images that an earlier run made there are left out.

    Returns:
        Each image once, in a stable order.

    Raises:
        PictureError: An input does not exist, or a given folder cannot be listed or reached.
    """
    search = _Search(report, recursive, identity_of(output_dir) if output_dir is not None else None)
    found: list[FoundPicture] = []
    for given in inputs:
        if is_folder(given):
            found.extend(search.in_folder(given, given))
        elif exists(given):
            found.extend(search.once(FoundPicture(given, given.parent)))
        else:
            raise PictureError(f"There is no {given}.", "Check the name of the file or folder.")
    return found


@dataclass
class _Search:
    report: SkipReport
    recursive: bool
    output_dir: str | None
    seen: set[str] = field(default_factory=set)

    def once(self, picture: FoundPicture) -> Iterator[FoundPicture]:
        real = identity_of(picture.path)
        if real not in self.seen:
            self.seen.add(real)
            yield picture

    def in_folder(self, folder: Path, root: Path, depth: int = 0) -> Iterator[FoundPicture]:
        # The real path also ends loops of links. The slash keeps folders and files apart.
        real = identity_of(folder)
        if real + os.sep in self.seen:
            return
        self.seen.add(real + os.sep)
        subfolders = []
        listed = self._listed(folder, root)
        stems = Counter(entry.path.stem for entry in listed)
        for entry in listed:
            path = entry.path
            if is_caption(path, stems):
                continue
            if entry.is_folder:
                subfolders.append(path)
                if path.suffix.lower() in FORMAT_OF_SUFFIX:
                    self.report.skip(path, "It is a folder, not a picture.")
            elif reason := self._skip_reason(path, self._is_output(real)):
                self.report.skip(path, reason)
            else:
                yield from self.once(FoundPicture(path, root))
        if self.recursive:
            for subfolder in subfolders:
                if depth == _MAX_DEPTH:
                    too_deep = PictureError(f"It lies more than {_MAX_DEPTH} folders deep.")
                    self.report.skip(subfolder, too_deep)
                elif identity_of(subfolder) != self.output_dir:
                    yield from self.in_folder(subfolder, root, depth + 1)

    def _listed(self, folder: Path, root: Path) -> list[Entry]:
        try:
            entries = entries_of(folder)
        except OSError as exc:
            reason = f"The folder cannot be listed ({exc.strerror})."
            if folder == root:
                hint = "Check that you may read it."
                raise PictureError(f"{folder}: {reason}", hint) from exc
            self.report.skip(folder, reason)
            return []
        shown = [entry for entry in entries if not entry.path.name.startswith(".")]
        return sorted(shown, key=lambda entry: natural_key(entry.path.name))

    def _is_output(self, real_folder: str) -> bool:
        output_dir = self.output_dir
        return output_dir is not None and (real_folder + os.sep).startswith(output_dir + os.sep)

    def _skip_reason(self, path: Path, in_output_dir: bool) -> str:
        """Return why a file in a folder is left out; empty if it is an image."""
        if not is_url(path) and not os.path.exists(path):
            return "It is a link to a file that is not there."
        suffix = path.suffix.lower()
        if suffix not in FORMAT_OF_SUFFIX:
            return f'Not a picture (its name ends in "{suffix}").' if suffix else "Not a picture."
        if FORMAT_OF_SUFFIX[suffix] not in readable_formats():
            return f"The installed Pillow cannot read {FORMAT_OF_SUFFIX[suffix]} files."
        if in_output_dir and suffix == ".png" and _made_by_us(path):
            return "It was made by an earlier run into this folder."
        return ""


def _made_by_us(path: Path) -> bool:
    try:
        return JOB_KEYWORD in read_png(path).texts
    except (OSError, UnsafeFileError):
        return False  # reading the image will report the error
