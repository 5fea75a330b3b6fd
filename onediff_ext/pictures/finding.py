"""Finding the pictures in files and folders."""

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
from onediff_ext.pictures.skipped import Report

# A walk takes time that grows with the cube of the depth, and calls for each level.
_MAX_DEPTH = 100

SortKey = tuple[tuple[tuple[int, int, str], ...], str]


@dataclass(frozen=True)
class FoundPicture:
    """A file that is worth opening.

    Args:
        path: The file.
        root: The folder that was given and in which it was found; for a file that was
            given itself, its folder. ``path.relative_to(root)`` keeps subfolders.
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
    report: Report,
    recursive: bool = False,
    output_dir: Path | None = None,
) -> list[FoundPicture]:
    """List the pictures in files and folders.

    A file that is given itself is taken whatever its ending; in folders the ending
    decides. Hidden files and folders are passed over. Pictures of a folder come in
    natural order, before those of its subfolders.

    Args:
        inputs: Files and folders, in the order wanted.
        report: Gets what lies in the folders and is no picture.
        recursive: Look into subfolders too.
        output_dir: Where results go. A folder search does not enter it; when it is itself
            given as input, pictures that an earlier run made there are left out.

    Returns:
        Each picture once, in a stable order.

    Raises:
        PictureError: An input does not exist, or a given folder cannot be listed.
    """
    search = _Search(report, recursive, _real(output_dir) if output_dir is not None else None)
    found: list[FoundPicture] = []
    for given in inputs:
        # Not Path's own tests, which raise for a name that is too long.
        if os.path.isdir(given):
            found.extend(search.in_folder(given, given))
        elif os.path.exists(given):
            found.extend(search.once(FoundPicture(given, given.parent)))
        else:
            raise PictureError(f"There is no {given}.", "Check the name of the file or folder.")
    return found


@dataclass
class _Search:
    report: Report
    recursive: bool
    output_dir: str | None
    seen: set[str] = field(default_factory=set)

    def once(self, picture: FoundPicture) -> Iterator[FoundPicture]:
        real = _real(picture.path)
        if real not in self.seen:
            self.seen.add(real)
            yield picture

    def in_folder(self, folder: Path, root: Path, depth: int = 0) -> Iterator[FoundPicture]:
        # The real path also ends loops of links. The slash keeps folders and files apart.
        real = _real(folder)
        if real + os.sep in self.seen:
            return
        self.seen.add(real + os.sep)
        subfolders = []
        listed = self._listed(folder, root)
        stems = Counter(path.stem for path in listed)
        for path in listed:
            if is_caption(path, stems):
                continue
            if os.path.isdir(path):
                subfolders.append(path)
                if path.suffix.lower() in FORMAT_OF_SUFFIX:
                    self.report.skip(path, "It is a folder, not a picture.")
            elif reason := self._why_not(path, self._is_output(real)):
                self.report.skip(path, reason)
            else:
                yield from self.once(FoundPicture(path, root))
        if self.recursive:
            for subfolder in subfolders:
                if depth == _MAX_DEPTH:
                    too_deep = PictureError(f"It lies more than {_MAX_DEPTH} folders deep.")
                    self.report.skip(subfolder, too_deep)
                elif _real(subfolder) != self.output_dir:
                    yield from self.in_folder(subfolder, root, depth + 1)

    def _listed(self, folder: Path, root: Path) -> list[Path]:
        try:
            names = [entry.name for entry in os.scandir(folder)]
        except OSError as exc:
            reason = f"The folder cannot be listed ({exc.strerror})."
            if folder == root:
                hint = "Check that you may read it."
                raise PictureError(f"{folder}: {reason}", hint) from exc
            self.report.skip(folder, reason)
            return []
        shown = [name for name in names if not name.startswith(".")]
        return [folder / name for name in sorted(shown, key=natural_key)]

    def _is_output(self, real_folder: str) -> bool:
        output_dir = self.output_dir
        return output_dir is not None and (real_folder + os.sep).startswith(output_dir + os.sep)

    def _why_not(self, path: Path, in_output_dir: bool) -> str:
        """Say why a file in a folder is not taken; empty when it is."""
        if not os.path.exists(path):
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
        return False  # Reading it will say why.


def _real(path: Path) -> str:
    return os.path.normcase(os.path.realpath(path))
