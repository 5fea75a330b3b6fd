"""Files of the C++ compiler that all graphs share, kept from one build process to the next.

For its first graph a process has g++ precompile two headers and compile probes of vector
instructions: 20 s of processor time and 300 MB (torch 2.13, GCC 12). Each process does so in
folders of its own, so a killed compiler's partial files disappear with its process. What a process
has finished is copied to a folder that the next processes take it from:

    <kept>/<digest of torch, the compiler and the machine>/<Inductor's file name>.<SHA-256>

Inductor names these files by the preprocessed header, the compiler's version and its flags. The
SHA-256 tells a damaged or partial file, which is deleted. While nothing is kept yet, one process
builds and the others wait, up to a minute.

Nothing here can fail a build: without these files the compiler makes them again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from onediff_ext.core.ownership import foreign_owner, other_writers
from onediff_ext.engine.backend_port import COMPILER_FILES_VARIABLE
from onediff_ext.engine.blocks.key_text import digest
from onediff_ext.engine.machine import machine_digest

logger = logging.getLogger(__name__)

_KEPT_NAME = re.compile(r"([a-z0-9]+\.(?:h|h\.gch|cpp|so))\.([0-9a-f]{64})")
_PROBE_MARK = b"_chk_kernel"  # the functions in Inductor's `VecISA` probes
_KEPT_MACHINES, _KEPT_FILES = 3, 24
_WAIT_S, _PART_AGE_S = 60.0, 3600.0


@contextlib.contextmanager
def reused_compiler_files() -> Iterator[None]:
    """Within the block, Inductor finds the kept files; those that it makes are kept after it.

    The block builds graphs. When it raises, nothing is kept.
    """
    files = _files_of_this_process()
    if files is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        if not files.take():
            with contextlib.suppress(OSError, Timeout, NotImplementedError):
                stack.enter_context(files.lock())
            if files.take():  # the process that held the lock has kept some
                stack.close()
        yield
        files.keep()


class CompilerFiles:
    """The kept files of one compiler, torch and machine, and their places in this process.

    Args:
        kept: The folder that processes share.
        headers: Inductor's folder of precompiled headers in this process.
        cache: Inductor's cache folder in this process, with the probes.

    Attributes:
        kept: As given.
    """

    def __init__(self, kept: Path, headers: Path, cache: Path) -> None:
        self.kept, self._headers, self._cache = kept, headers, cache
        self._older = {path.name for path in self._own_files()}  # maybe partial
        self._shared: set[str] = set()  # names that this process has taken or kept

    def lock(self) -> FileLock:
        """The lock of the process that builds while nothing is kept; to be entered.

        Raises:
            OSError: The folder cannot be made.
            Timeout: On entering, another process holds it for a minute.
        """
        self.kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        return FileLock(self.kept / "lock", timeout=_WAIT_S)

    def take(self) -> bool:
        """Put the kept files in their places; damaged ones are deleted.

        Returns:
            Whether this process has any, also from an earlier call.
        """
        if not self._shared:
            try:
                found = list(self.kept.iterdir())
                os.utime(self.kept)
            except OSError:
                return False
            for path in found:
                match = _KEPT_NAME.fullmatch(path.name)
                if match is None:
                    continue
                try:
                    if _put(path, self._place(match[1]), match[2]):
                        self._shared.add(match[1])
                except OSError as exc:
                    logger.debug("%s is not used: %s", path, exc)
        return bool(self._shared)

    def keep(self) -> None:
        """Copy the files that this process has made to the shared folder."""
        known = self._older | self._shared
        new = [path for path in self._own_files() if path.name not in known]
        if not new:
            return
        try:
            self.kept.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in new:
                self._shared.add(path.name)
                part = self.kept / f"{secrets.token_hex(8)}.part"
                try:
                    shutil.copyfile(path, part)
                    part.chmod(0o600)
                    part.replace(self.kept / f"{path.name}.{_sha256(part)}")
                finally:
                    part.unlink(missing_ok=True)
            self._prune()
        except OSError as exc:
            logger.debug("The compiler's files are not kept in %s: %s", self.kept, exc)

    def _place(self, name: str) -> Path:
        """Where Inductor looks for a file."""
        is_header = name.endswith((".h", ".gch"))
        return (self._headers if is_header else self._cache / name[1:3]) / name

    def _own_files(self) -> Iterator[Path]:
        for header in self._headers.glob("*.h"):
            compiled = header.with_name(f"{header.name}.gch")
            if compiled.exists():
                yield from (header, compiled)
        for source in self._cache.glob("??/*.cpp"):
            library = source.with_suffix(".so")
            if library.exists() and _PROBE_MARK in source.read_bytes():
                yield from (source, library)

    def _prune(self) -> None:
        """Delete the oldest files and machines, and what killed processes left."""
        for path in self.kept.glob("*.part"):
            if time.time() - path.stat().st_mtime > _PART_AGE_S:
                path.unlink(missing_ok=True)
        for old in _by_age(self.kept.glob("*.*"))[:-_KEPT_FILES]:
            old.unlink(missing_ok=True)
        for old in _by_age(self.kept.parent.iterdir())[:-_KEPT_MACHINES]:
            shutil.rmtree(old, ignore_errors=True)


@functools.cache
def _files_of_this_process() -> CompilerFiles | None:
    """The files for this process's compiler; None where there is nothing to keep.

    Only GCC: it checks that a precompiled header is its own, and finds it at another path.
    """
    kept = os.environ.get(COMPILER_FILES_VARIABLE)
    if not kept or not os.path.isabs(kept):
        return None
    try:
        from torch._inductor import codecache, cpp_builder

        compiler: Any = cpp_builder.get_cpp_compiler()
        if not cpp_builder.is_gcc():
            return None
        inductor: Any = codecache
        headers, cache = Path(inductor._HEADER_DIR), Path(inductor.cache_dir())
        status = os.stat(program := os.path.realpath(shutil.which(compiler) or compiler))
    except (AttributeError, ImportError, OSError, RuntimeError, subprocess.SubprocessError) as exc:
        logger.debug("No files of the compiler are kept: %s", exc)
        return None
    described = "\n".join(
        (
            machine_digest(torch.device("cpu")),
            f"{torch.__file__} {torch.version.git_version}",
            f"{program} {status.st_size} {status.st_mtime_ns}",
        )
    )
    # A whole digest would make paths too long for Windows.
    return CompilerFiles(Path(kept) / digest(described)[:32], headers, cache)


def _put(source: Path, target: Path, checksum: str) -> bool:
    """Link or copy a kept file to its place, unless it is damaged or another user's.

    Returns:
        Whether the file is in its place.
    """
    status = source.stat()
    if foreign_owner(status) or other_writers(status):
        return False
    if target.exists():
        return True
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{secrets.token_hex(8)}.part")
    try:
        try:
            os.link(source, part)
        except OSError:  # another disk, or one without links
            shutil.copyfile(source, part)
        if _sha256(part) != checksum:
            source.unlink(missing_ok=True)
            return False
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return True


def _sha256(path: Path) -> str:
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum.update(block)
    return checksum.hexdigest()


def _by_age(paths: Iterator[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)
