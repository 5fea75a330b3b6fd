"""Graph archives, for other machines: a plain zip of graph files.

The names in an archive are compared and never used as paths: the key in a graph's header decides
where the graph is stored.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
import zipfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

from onediff_ext.core.errors import (
    GraphCorruptError,
    StoreError,
    StoreFullError,
    UnsafeFileError,
    UntrustedGraphError,
)
from onediff_ext.core.records import ORIGIN_IMPORTED, GraphHeader
from onediff_ext.core.untrusted_files import open_regular, other_kind, read_regular
from onediff_ext.store.graph_file import UnknownSchemaError, read_head, read_payload
from onediff_ext.store.stored_graph import MAX_GRAPH_BYTES, SUFFIX
from onediff_ext.store.write_errors import mapped_write_errors

_NAME = re.compile(rf"([0-9a-f]{{64}}){re.escape(SUFFIX)}")
_FIRST_ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # fixed, so that equal graphs make equal archives
_ENCRYPTED = 0x1
_ARCHIVE_BYTES = 1 << 40  # the store's own limit applies to the sum of the graphs
_ARCHIVE_S = 3600.0
_GRAPH_S = 300.0
_HINT = "Export it again on the machine that it comes from."


@dataclass(frozen=True)
class ImportReport:
    """The result of an import.

    Args:
        imported: Digests of the imported graphs.
        kept: Digests of graphs that were stored already and stayed unchanged.
    """

    imported: tuple[str, ...]
    kept: tuple[str, ...]


def write_archive(archive_path: Path, paths: Sequence[Path]) -> int:
    """Check graph files and write them to an archive.

    Args:
        archive_path: The archive; an earlier file is replaced.
        paths: The graph files.

    Returns:
        The number of graphs.

    Raises:
        StoreError: A graph is missing, damaged or of another version; or a folder, device or link
            has the archive's name.
        StoreFullError, StoreReadOnlyError: The archive cannot be written.
    """
    if kind := other_kind(archive_path):
        raise StoreError(f"{archive_path} is {kind}, not a file.", "Name another file.")
    part = archive_path.with_name(f".{archive_path.name}.{secrets.token_hex(8)}.part")
    try:
        with mapped_write_errors(archive_path):
            with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
                for path in paths:
                    archive.writestr(
                        zipfile.ZipInfo(path.name, _FIRST_ZIP_DATE), _checked_bytes(path)
                    )
            os.replace(part, archive_path)
    finally:
        with mapped_write_errors(part):
            part.unlink(missing_ok=True)
    return len(paths)


def read_archive(
    path: Path, *, trust: bool, limit_bytes: int
) -> Generator[tuple[GraphHeader, bytes], None, None]:
    """Check a whole archive, then return its graphs one by one.

    Args:
        path: The archive.
        trust: Whether the user trusts the native code in it.
        limit_bytes: Size limit of the store.

    Yields:
        Each graph's header, marked as imported, and its payload.

    Raises:
        UntrustedGraphError: `trust` is false.
        GraphCorruptError: The archive, or a graph in it, is damaged.
        UnknownSchemaError: A graph is of another version.
        StoreFullError: The graphs are larger than `limit_bytes`.
        StoreError: There is no such archive.
    """
    try:
        file = open_regular(path, limit_bytes=_ARCHIVE_BYTES, limit_s=_ARCHIVE_S)
    except UnsafeFileError as exc:
        raise StoreError(exc.message, exc.hint) from exc
    except OSError as exc:
        raise StoreError(
            f"{path} cannot be read ({exc.strerror or exc}).", "Check the file's name."
        ) from exc
    with file:
        if not trust:
            raise UntrustedGraphError(
                f"{path.name} may hold native code that would run on this machine.",
                "Graphs are native code, like a program: if you trust where the file comes "
                f"from, run `onediff-ext graphs import {path} --trust`.",
            )
        try:
            with zipfile.ZipFile(file) as archive:
                members = _checked_members(archive, path, limit_bytes)
                for member in members:
                    _read_member(archive, member)
                for member in members:
                    yield _read_member(archive, member)
        except UnsafeFileError as exc:
            raise StoreError(exc.message, exc.hint) from exc
        except _ZIP_ERRORS as exc:
            raise GraphCorruptError(f"{path.name} is not a sound archive: {exc}.", _HINT) from exc


# What `zipfile` raises for damaged archives, found by flipping their bytes.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    EOFError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    UnicodeError,
    ValueError,
    struct.error,
)


def _checked_members(
    archive: zipfile.ZipFile, path: Path, limit_bytes: int
) -> list[zipfile.ZipInfo]:
    members = archive.infolist()
    for member in members:
        if not _NAME.fullmatch(member.filename):
            raise GraphCorruptError(
                f"{path.name} holds {member.filename!r}, which is no graph.", _HINT
            )
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
            raise GraphCorruptError(f"{path.name} is packed in a way we do not use.", _HINT)
    if len({member.filename for member in members}) < len(members):
        raise GraphCorruptError(f"{path.name} holds a graph twice.", _HINT)
    if any(member.file_size > MAX_GRAPH_BYTES for member in members):
        raise GraphCorruptError(f"{path.name} holds a graph of a size that none has.", _HINT)
    size_bytes = sum(member.file_size for member in members)
    if size_bytes > limit_bytes:
        raise StoreFullError(
            f"{path.name} holds {size_bytes} bytes of graphs, the store may have {limit_bytes}.",
            "Raise the store's size limit in the settings.",
        )
    return members


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[GraphHeader, bytes]:
    digest = member.filename.removesuffix(SUFFIX)
    return checked_graph(digest, archive.read(member), member.filename)


def _checked_bytes(path: Path) -> bytes:
    try:
        graph_file = read_regular(path, limit_bytes=MAX_GRAPH_BYTES, limit_s=_GRAPH_S)
    except UnsafeFileError as exc:
        raise StoreError(exc.message, "Run `onediff-ext graphs verify`.") from exc
    except OSError as exc:
        raise StoreError(
            f"Graph {path.stem} cannot be read ({exc.strerror or exc}).",
            "`onediff-ext graphs list` shows what is stored.",
        ) from exc
    _decoded(graph_file, path.name)
    return graph_file


def checked_graph(digest: str, graph_file: bytes, name: str) -> tuple[GraphHeader, bytes]:
    """Return header and payload of a graph that another store holds; its origin is "imported".

    Args:
        digest: Of the kind that it has to be the graph of.
        graph_file: The bytes of its file.
        name: Of the file, for errors.

    Raises:
        GraphCorruptError: They are damaged, or of another kind.
        UnknownSchemaError: Another version wrote them.
    """
    header, payload = _decoded(graph_file, name)
    if header.key.digest != digest:
        raise GraphCorruptError(f"{name} holds the graph of another kind.", _HINT)
    return replace(header, origin=ORIGIN_IMPORTED), payload


def _decoded(graph_file: bytes, name: str) -> tuple[GraphHeader, bytes]:
    stream = BytesIO(graph_file)
    try:
        header = read_head(stream, len(graph_file))
        return header, read_payload(stream, header)
    except GraphCorruptError as exc:
        raise GraphCorruptError(f"{name} is damaged: {exc.message}.", _HINT) from exc
    except UnknownSchemaError as exc:
        raise UnknownSchemaError(f"{name} was {exc.message}.", exc.hint) from exc
