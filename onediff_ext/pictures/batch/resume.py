"""Finds the results that exist already, so that a stopped run continues.

Each result carries the digest of the job that made it. A complete file with the current job's
digest is done. A file of another job is replaced. A file that no job over folders made is kept,
such as one of text to image, and the result gets another name.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from onediff_ext.core.errors import OptionError, PictureError, UnsafeFileError
from onediff_ext.pictures.naming import numbered
from onediff_ext.pictures.picture_header import PictureHeader
from onediff_ext.pictures.png_chunks import JOB_KEYWORD, SINGLE_PREFIX, PngChunks, read_png
from onediff_ext.pictures.urls import files_below, for_each, identity_of, is_url

_DIGEST_SCHEMA = 1


@dataclass(frozen=True)
class Output:
    """The file of a result.

    Args:
        path: The PNG file.
        is_done: The file exists, is complete and comes from the same job.
    """

    path: Path
    is_done: bool


def job_digest(settings: Mapping[str, object], header: PictureHeader) -> str:
    """Return a digest of everything that a result depends on.

    The input counts by its name, size in bytes, time of change and size in pixels: reading 10,000
    whole files would take longer than many runs. Its folder does not count, so results stay valid
    when the folder moves.

    Args:
        settings: Name → value: texts, numbers, booleans, None, paths, and lists and mappings of
            them, in any order.
        header: Of the input.

    Returns:
        SHA-256, 64 hexadecimal digits.

    Raises:
        OptionError: A value is of another type.
    """
    entries = {
        "schema": _DIGEST_SCHEMA,
        "settings": {name: _plain(name, value) for name, value in settings.items()},
        "input": [
            header.path.name,
            header.size_bytes,
            header.modified_ns,
            header.width_px,
            header.height_px,
        ],
    }
    text = json.dumps(entries, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def is_done(path: Path, digest: str) -> bool:
    """Whether `path` is a complete PNG file that the job of this digest made.

    Only the file's chunks are read, no pixels; a truncated file is not done.

    Raises:
        PictureError: The file exists and cannot be read.
    """
    return _is_done(_read(path), (digest,))


def plan_outputs(
    output_dir: Path,
    names: Sequence[str],
    digests: Sequence[str],
    *,
    inputs: Iterable[Path] = (),
    earlier: Sequence[Sequence[str]] = (),
) -> list[Output]:
    """Choose the file of each result.

    Args:
        output_dir: The folder; it may be missing.
        names: One distinct relative name for each result, from `naming.distinct_names`.
        digests: The job's digest for each result.
        inputs: Files that are never overwritten, even if an earlier run made them.
        earlier: For each result the digests that earlier versions gave to the same job; may be
            empty.

    Returns:
        One output for each name. The name changes (``a-2.png``) only if its file is an input or
        was not made by a job.

    Raises:
        PictureError: An existing file cannot be read.
    """
    taken = {identity_of(path) for path in inputs}
    reserved = {identity_of(output_dir / name) for name in names}
    existing = _ExistingFiles(output_dir, names)
    outputs = []
    for number, (name, digest) in enumerate(zip(names, digests, strict=True)):
        accepted = {digest, *(earlier[number] if earlier else ())}
        output = _choose(output_dir, name, accepted, taken, reserved, existing)
        taken.add(identity_of(output.path))
        outputs.append(output)
    return outputs


class _ExistingFiles:
    """What is in the folder of the results. At a URL it is listed once, and threads read it.

    Args:
        folder: The folder.
        names: Names that will be asked for.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        try:
            self._known = files_below(folder)
        except OSError as exc:
            raise PictureError(
                f"{folder} cannot be listed ({exc.strerror}).",
                "Check that you may read it, or choose another output folder.",
            ) from exc
        known = self._known or ()
        paths = [folder / name for name in names] if known else []
        there = [path for path in paths if identity_of(path) in known]
        read = for_each(_read, there, there)
        self._chunks = dict(zip(map(identity_of, there), read, strict=True))

    def read(self, path: Path) -> PngChunks | None:
        """Return what `_read` does."""
        if self._known is None:
            return _read(path)
        identity = identity_of(path)
        if identity not in self._known:
            return None
        return self._chunks[identity] if identity in self._chunks else _read(path)


def _choose(
    output_dir: Path,
    name: str,
    digests: Collection[str],
    taken: set[str],
    reserved: set[str],
    existing: _ExistingFiles,
) -> Output:
    number = 1
    candidate = output_dir / name
    while True:
        real = identity_of(candidate)
        if real not in taken and (number == 1 or real not in reserved):
            chunks = existing.read(candidate)
            if chunks is None or _is_of_a_folder(chunks):
                return Output(candidate, _is_done(chunks, digests))
        number += 1
        candidate = output_dir / numbered(name, number)


def _is_of_a_folder(chunks: PngChunks) -> bool:
    """Whether a job over folders of inputs made a file; it may be replaced then."""
    digest = chunks.texts.get(JOB_KEYWORD, "")
    return digest != "" and not digest.startswith(SINGLE_PREFIX)


def _is_done(chunks: PngChunks | None, digests: Collection[str]) -> bool:
    if chunks is None or not chunks.is_complete:
        return False
    return chunks.texts.get(JOB_KEYWORD) in digests


def _read(path: Path) -> PngChunks | None:
    """Read the chunks at a path: None without a file, empty chunks for a folder."""
    try:
        return PngChunks() if not is_url(path) and path.is_dir() else read_png(path)
    except UnsafeFileError:
        return PngChunks()  # a device or a pipe, which no job made
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise PictureError(
            f"{path} is there and cannot be read ({exc.strerror}).",
            "Give yourself permission to read it, or choose another output folder.",
        ) from exc


def _plain(name: str, value: object) -> object:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(name, entry) for entry in value]
    raise OptionError(
        f'The setting "{name}" cannot be part of a job\'s digest: {value!r}.',
        "Use texts, numbers, paths, lists and mappings.",
    )
