"""Content hashes: a checkpoint is identified by its bytes, and not by its name.

Hashing 7 GB takes seconds, so hashes are cached by (path, size, mtime, ctime). The last one tells
of a file that was copied over another one with its mtime. Without a readable cache, hashing only
takes longer.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from onediff_ext.core.errors import CheckpointError, UnsafeFileError
from onediff_ext.core.records import mapping
from onediff_ext.core.untrusted_files import open_regular
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.shared_record import SharedRecord
from onediff_ext.store.stored_graph import is_digest

_MODEL_INDEX = "model_index.json"
CONTENT_HASHES_FILE = "content-hashes.json"
_SCHEMA = 1
MAX_CACHED = 1024
_LOCK_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 20
_CHECKPOINT_BYTES = 1 << 40
_CHECKPOINT_S = 3600.0  # 7 GB from a slow network disk take minutes
_FOLDER_SUFFIXES = {".safetensors", ".json"}
# A file that was changed so recently may change again within the resolution of its time stamp (2 s
# on FAT), unnoticed. git calls it "racily clean". It is hashed again next time.
_SETTLED_NS = 2_000_000_000

_Fingerprint = tuple[int, int, int]  # size in bytes, mtime and ctime in ns
_Files = dict[str, dict[str, object]]  # by path


def model_folder(path: Path) -> Path:
    """Return the diffusers folder that a ``model_index.json`` stands for; other paths as they are.

    Args:
        path: Of a checkpoint.
    """
    return path.parent if path.name == _MODEL_INDEX else path


class ContentHashes:
    """Content hashes of checkpoints, cached in the store.

    Args:
        folder: The store, e.g. `GraphLibrary.folder`.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._record = SharedRecord(
            folder, CONTENT_HASHES_FILE, _SCHEMA, _parse, _fields, _LOCK_TIMEOUT_S
        )

    def content_hash(self, path: Path) -> str:
        """Return the SHA-256 of a checkpoint, 64 hexadecimal digits.

        Args:
            path: A file, or a diffusers folder, which its ``model_index.json`` stands for. The hash
                of a folder covers the relative paths and the hashes of its .safetensors and .json
                files.

        Raises:
            CheckpointError: It cannot be read, or the folder holds no such file.
        """
        cached = self._record.read()
        fresh: _Files = {}
        try:
            if (folder := model_folder(path)).is_dir():
                content_hash = self._folder_hash(folder, cached, fresh)
            else:
                content_hash = self._file_hash(path, cached, fresh)
        except UnsafeFileError as exc:
            raise CheckpointError(exc.message, exc.hint) from exc
        except ValueError as exc:  # the path contains a NUL
            raise CheckpointError(
                f"{str(path)!r} is not the name of a file.",
                "Check the path; nothing is downloaded.",
            ) from exc
        except FileNotFoundError as exc:
            raise CheckpointError(
                f"There is no file {path}.", "Check the path; nothing is downloaded."
            ) from exc
        except RecursionError as exc:  # of Path.rglob up to Python 3.12
            raise CheckpointError(
                f"{path} is nested too deeply.", "Choose the top folder of a diffusers model."
            ) from exc
        except RuntimeError as exc:  # of Path.resolve up to Python 3.12
            raise CheckpointError(
                f"{path} is a link that leads to no file.", "Name the file itself."
            ) from exc
        except OSError as exc:
            raise CheckpointError(
                f"{path} cannot be read ({exc.strerror or exc}).",
                "Give yourself permission to read it, or check its disk.",
            ) from exc
        if fresh:
            self._record.change(lambda files: _add(files, fresh))
        return content_hash

    def _folder_hash(
        self,
        folder: Path,
        cached: Mapping[str, dict[str, object]],
        fresh: _Files,
    ) -> str:
        files = {
            path.relative_to(folder).as_posix(): path
            for path in folder.rglob("*")
            if path.suffix in _FOLDER_SUFFIXES and path.is_file()
        }
        if not files:
            raise CheckpointError(
                f"{folder} holds no .safetensors or .json file.",
                "Choose a checkpoint file, or a folder in the diffusers layout.",
            )
        total = hashlib.sha256()
        for name in sorted(files):
            file_hash = self._file_hash(files[name], cached, fresh)
            total.update(f"{name}\0{file_hash}\n".encode("utf-8", "surrogateescape"))
        return total.hexdigest()

    def _file_hash(
        self,
        path: Path,
        cached: Mapping[str, dict[str, object]],
        fresh: _Files,
    ) -> str:
        # Resolved, so that the links of a Hugging Face snapshot share their blob's entry.
        name = os.path.realpath(path)  # Path.resolve raises RuntimeError for a loop of links
        fingerprint = _fingerprint(os.stat(name))
        entry = cached.get(name, {})
        known = entry.get("sha256")
        cached_as = (entry.get("size_bytes"), entry.get("mtime_ns"), entry.get("ctime_ns"))
        if cached_as == fingerprint and isinstance(known, str) and is_digest(known):
            return known
        file_hash = _sha256(Path(name))
        size_bytes, mtime_ns, ctime_ns = after = _fingerprint(os.stat(name))
        settled = time.time_ns() - mtime_ns > _SETTLED_NS
        if settled and fingerprint == after:
            fresh[name] = {
                "size_bytes": size_bytes,
                "mtime_ns": mtime_ns,
                "ctime_ns": ctime_ns,
                "sha256": file_hash,
                "hashed_at": time.time(),
            }
        return file_hash


def _fields(files: _Files) -> dict[str, object]:
    return {"files": files}


def _parse(fields: Mapping[str, object]) -> _Files:
    files = mapping(fields.get("files", {}), "hashed files")
    return {name: entry for name, entry in files.items() if isinstance(entry, dict)}


def _add(files: _Files, fresh: _Files) -> None:
    files.update(fresh)
    latest = sorted(files, key=lambda name: _hashed_at(files[name]), reverse=True)
    for old in latest[MAX_CACHED:]:
        del files[old]


def _sha256(path: Path) -> str:
    total = hashlib.sha256()
    with open_regular(path, limit_bytes=_CHECKPOINT_BYTES, limit_s=_CHECKPOINT_S) as file:
        while chunk := file.read(_READ_BYTES):
            total.update(chunk)
    return total.hexdigest()


def _fingerprint(status: os.stat_result) -> _Fingerprint:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _hashed_at(entry: Mapping[str, object]) -> float:
    value = entry.get("hashed_at")
    try:
        return float(value) if isinstance(value, (int, float)) else 0.0
    except OverflowError:
        return 0.0
