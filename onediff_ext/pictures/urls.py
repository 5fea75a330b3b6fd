"""Pictures at URLs, such as ``s3://bucket/photos``, through fsspec.

universal_pathlib gives a URL the methods of a `pathlib.Path`. Most of them are a request to a
server, so what concerns many files is here: a folder is listed once, and files are read by threads.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from onediff_ext.core.errors import OneDiffError, OptionError, PictureError, UnsafeFileError
from onediff_ext.core.untrusted_files import open_regular
from onediff_ext.core.url_errors import opening

Item = TypeVar("Item")
Result = TypeVar("Result")

_THREADS = 32
# They show an object when all of it has arrived, and their rename is a copy. Elsewhere a file is
# written under another name first.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "memory"}


@dataclass(frozen=True)
class Entry:
    """What a folder holds.

    Args:
        path: The file or folder.
        is_folder: It is a folder, or a link to one.
    """

    path: Path
    is_folder: bool


def parse_path(text: str) -> Path:
    """Read the path or URL of a file or folder.

    Args:
        text: A path of this machine, or a URL with a protocol of fsspec.

    Returns:
        A path of this machine, or one of universal_pathlib, which has the same methods. `is_url`
        tells them apart.

    Raises:
        OptionError: universal_pathlib, or the package for this kind of URL, is not installed, or
            the protocol is unknown.
    """
    if "://" not in text:
        return Path(text)
    try:
        from upath import UPath
    except ImportError as exc:
        hint = 'Install it: pip install "onediff-ext[cluster]"'
        raise OptionError(f"Reading {text} needs the package universal_pathlib.", hint) from exc
    with opening(text):
        path: Any = UPath(text)
        path.fs  # noqa: B018 - imports the package of this protocol
    return Path(path.path) if _is_of_this_machine(path) else cast(Path, path)


def is_url(path: Path) -> bool:
    """Whether a path from `parse_path` is a URL."""
    return not isinstance(path, Path)


def identity_of(path: Path) -> str:
    """Return a text that is equal for names of one file or folder, its parts joined by os.sep."""
    if is_url(path):
        return str(path).rstrip("/").replace("/", os.sep)
    return os.path.normcase(os.path.realpath(path))


def is_folder(path: Path) -> bool:
    """Return whether a folder is there.

    Raises:
        PictureError: The server of a URL does not say.
    """
    if is_url(path):
        return _asked(path, path.is_dir)
    return os.path.isdir(path)  # Path.is_dir raises for a name that is too long


def exists(path: Path) -> bool:
    """Return whether a file or folder is there.

    Raises:
        PictureError: The server of a URL does not say.
    """
    return _asked(path, path.exists) if is_url(path) else os.path.exists(path)


def _asked(path: Path, question: Callable[[], bool]) -> bool:
    try:
        with errors_of_requests(path):
            return question()
    except OSError as exc:
        hint = "Check its name, and that you may read it."
        raise PictureError(f"{path} cannot be reached ({exc.strerror or exc}).", hint) from exc


def entries_of(folder: Path) -> list[Entry]:
    """List a folder, in any order.

    Raises:
        OSError: It cannot be listed.
    """
    if not is_url(folder):
        paths = [folder / entry.name for entry in os.scandir(folder)]
        return [Entry(path, os.path.isdir(path)) for path in paths]
    files, root = _file_system(folder)
    with errors_of_requests(folder):
        found = files.ls(root, detail=True)
    named = [(str(info["name"]).rstrip("/").rpartition("/"), info["type"]) for info in found]
    # An object store may list an empty object that stands for the folder itself.
    return [
        Entry(folder / name, kind == "directory")
        for (parent, _, name), kind in named
        if f"{parent}/{name}".strip("/") != root.strip("/")
    ]


def files_below(folder: Path) -> set[str] | None:
    """Return the identities of all files in a folder and its subfolders.

    Returns:
        None for a folder of this machine, where asking for each file costs nothing.

    Raises:
        OSError: The folder cannot be listed. One that is missing has no files.
    """
    if not is_url(folder):
        return None
    files, root = _file_system(folder)
    with errors_of_requests(folder):
        try:
            found = files.find(root)
        except FileNotFoundError:
            return set()
    start = root.strip("/")
    inside = [str(name).strip("/")[len(start) :].strip("/") for name in found]
    return {identity_of(folder / name) for name in inside if name}


@contextlib.contextmanager
def open_file(path: Path, *, limit_bytes: int, limit_s: float) -> Iterator[BinaryIO]:
    """Open a file for reading, within the ``with`` block.

    Args:
        path: The file.
        limit_bytes: The largest sensible size of this kind of file.
        limit_s: Seconds for all reading on this machine. Over a network the package of the
            protocol has limits of its own.

    Raises:
        UnsafeFileError: As for `open_regular`.
        OSError: The file does not exist or cannot be read.
    """
    if not is_url(path):
        with open_regular(path, limit_bytes=limit_bytes, limit_s=limit_s) as stream:
            yield stream
        return
    with errors_of_requests(path):
        size_bytes = path.stat().st_size
        if size_bytes > limit_bytes:
            text = f"{path} has {size_bytes} bytes; more than {limit_bytes} are not read."
            raise UnsafeFileError(text, "Name another file.")
        remote: Any = path.open("rb")
    with io.BufferedReader(_RequestedFile(path, remote)) as stream:
        yield cast(BinaryIO, stream)


class _RequestedFile(io.RawIOBase):
    """A file at a URL; each of its errors is an OSError.

    Args:
        path: For messages.
        file: From the package of its protocol.
    """

    def __init__(self, path: Path, file: Any) -> None:
        super().__init__()
        self._path, self._file = path, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with errors_of_requests(self._path):
            found = self._file.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with errors_of_requests(self._path):
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def write_whole(path: Path, content: bytes, unfinished: str) -> None:
    """Write a file at a URL, complete or not at all.

    Args:
        path: The file. Missing folders are made, an existing file is replaced.
        content: All of it.
        unfinished: The name that the file has while it is written, where that can be seen.

    Raises:
        OSError: It cannot be written.
    """
    files, name = _file_system(path)
    part = f"{name.rpartition('/')[0]}/{unfinished}"
    with errors_of_requests(path):
        files.makedirs(name.rpartition("/")[0], exist_ok=True)
        if _protocols(files) & _OBJECT_STORES:
            files.pipe_file(name, content)
            return
        try:
            files.pipe_file(part, content)
            try:
                files.mv(part, name)
            except FileExistsError:  # a server whose rename replaces nothing
                files.rm_file(name)
                files.mv(part, name)
        except BaseException:
            with contextlib.suppress(Exception):
                files.rm_file(part)
            raise


def try_folder(folder: Path, trial: str) -> None:
    """Make a folder at a URL and those above it, and check that it takes a file.

    Args:
        folder: The folder.
        trial: Name of a file that is written there and deleted.

    Raises:
        OSError: It cannot be made or written to.
    """
    files, name = _file_system(folder)
    with errors_of_requests(folder):
        files.makedirs(name, exist_ok=True)
        try:
            files.pipe_file(f"{name}/{trial}", b"")
        except BaseException:
            with contextlib.suppress(Exception):
                files.rm_file(f"{name}/{trial}")
            raise
        files.rm_file(f"{name}/{trial}")


def for_each(
    function: Callable[[Item], Result], items: Iterable[Item], paths: Sequence[Path]
) -> list[Result]:
    """Return a function's results in order; threads call it where its files are at URLs.

    Args:
        function: Reads one file.
        items: Its arguments.
        paths: The files.
    """
    if not any(map(is_url, paths)):
        return list(map(function, items))
    with ThreadPoolExecutor(_THREADS, "onediff-requests") as threads:
        return list(threads.map(function, items))


@contextlib.contextmanager
def errors_of_requests(path: Path) -> Iterator[None]:
    """Turn the errors of a protocol's package into OSError: each has classes of its own.

    Args:
        path: What was asked for.
    """
    try:
        yield
    except (OSError, OneDiffError):
        raise
    except Exception as exc:
        reason = " ".join(str(exc).split()) or type(exc).__name__
        raise OSError(errno.EIO, f"{type(exc).__name__}: {reason[:200]}", str(path)) from exc


def _file_system(path: Path) -> tuple[Any, str]:
    remote: Any = path
    return remote.fs, str(remote.path).rstrip("/")


def _protocols(files: Any) -> set[str]:
    found = files.protocol
    return {found} if isinstance(found, str) else set(found)


def _is_of_this_machine(path: Any) -> bool:
    return bool(_protocols(path.fs) & {"file", "local"})
