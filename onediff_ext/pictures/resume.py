"""Which results are there already, so that a run that was stopped can go on.

Each result carries the digest of the job that made it. A result that is whole and has
the digest of the job at hand is done; one of another job is made again in its place;
a file that is not ours is left alone, and another name taken.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from onediff_ext.core.errors import OptionError, PictureError, UnsafeFileError
from onediff_ext.pictures.naming import numbered
from onediff_ext.pictures.picture_header import PictureHeader
from onediff_ext.pictures.png_chunks import JOB_KEYWORD, PngChunks, read_png

_DIGEST_SCHEMA = 1


@dataclass(frozen=True)
class Output:
    """Where a result goes.

    Args:
        path: The PNG file.
        is_done: It is there and whole, from the same job; nothing is left to do.
    """

    path: Path
    is_done: bool


def job_digest(settings: Mapping[str, object], facts: PictureHeader) -> str:
    """Digest everything that a result depends on.

    The input counts by its name, size in bytes, time of change and size in pixels:
    reading 10,000 pictures whole only to compare them would take longer than many a
    run. Its folder does not count, so a moved folder is not made again.

    Args:
        settings: Name → value; texts, numbers, booleans, None, paths, and lists and
            mappings of them. Their order does not count.
        facts: The input.

    Returns:
        SHA-256, 64 hexadecimal digits.

    Raises:
        OptionError: A value is of another type.
    """
    entries = {
        "schema": _DIGEST_SCHEMA,
        "settings": {name: _plain(name, value) for name, value in settings.items()},
        "input": [
            facts.path.name,
            facts.size_bytes,
            facts.modified_ns,
            facts.width_px,
            facts.height_px,
        ],
    }
    text = json.dumps(entries, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def is_done(path: Path, digest: str) -> bool:
    """Say whether `path` is a whole PNG file that the job of this digest made.

    Only the file's chunks are walked through; a file that is cut off is not done.

    Raises:
        PictureError: The file is there and cannot be read.
    """
    return _is_done(_read(path), digest)


def plan_outputs(
    output_dir: Path,
    names: Sequence[str],
    digests: Sequence[str],
    *,
    inputs: Iterable[Path] = (),
) -> list[Output]:
    """Settle where each result goes.

    Args:
        output_dir: The folder; need not exist.
        names: One distinct relative name for each result, from `naming.distinct_names`.
        digests: The job's digest for each result.
        inputs: Files that are never written to, even when an earlier run made them.

    Returns:
        One output for each name. A name is changed (``a-2.png``) only where a file
        stands that we did not make, or that is an input.

    Raises:
        PictureError: A file that is there cannot be read.
    """
    taken = {_real(path) for path in inputs}
    reserved = {_real(output_dir / name) for name in names}
    outputs = []
    for name, digest in zip(names, digests, strict=True):
        output = _choose(output_dir, name, digest, taken, reserved)
        taken.add(_real(output.path))
        outputs.append(output)
    return outputs


def _choose(
    output_dir: Path, name: str, digest: str, taken: set[str], reserved: set[str]
) -> Output:
    number = 1
    candidate = output_dir / name
    while True:
        real = _real(candidate)
        if real not in taken and (number == 1 or real not in reserved):
            chunks = _read(candidate)
            if chunks is None or JOB_KEYWORD in chunks.texts:
                return Output(candidate, _is_done(chunks, digest))
        number += 1
        candidate = output_dir / numbered(name, number)


def _is_done(chunks: PngChunks | None, digest: str) -> bool:
    return chunks is not None and chunks.is_complete and chunks.texts.get(JOB_KEYWORD) == digest


def _read(path: Path) -> PngChunks | None:
    """Read what stands at a path: None when nothing does, empty chunks for a folder."""
    try:
        return PngChunks() if path.is_dir() else read_png(path)
    except UnsafeFileError:
        return PngChunks()  # a device or a pipe: no result of ours
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise PictureError(
            f"{path} is there and cannot be read ({exc.strerror}).",
            "Give yourself permission to read it, or choose another output folder.",
        ) from exc


def _real(path: Path) -> str:
    return os.path.normcase(os.path.realpath(path))


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
