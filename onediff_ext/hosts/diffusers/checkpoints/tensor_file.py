"""Open a safetensors file (keys, shapes, metadata) and explain why any other file is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from onediff_ext.core.errors import CheckpointError, UnsafeFileError
from onediff_ext.core.untrusted_files import open_regular

if TYPE_CHECKING:
    import torch

PICKLE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""

_MAX_DIAGNOSED_BYTES = 16 * 2**20
"""Larger headers are not read just for a better error message."""

MAX_FILE_BYTES = 2**40
_LOOK_LIMIT_S = 60.0

_DAMAGE = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError
)  # fmt: skip
"""Errors from parsing a header that is not a safetensors header."""

_DOWNLOAD_AGAIN = "Download the file again, and compare its size with the source's."

_MAGIC = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the model", "Run `git lfs pull`."),
    (b"<!DOCTYPE", "is a web page, not a model", "Download the file itself, not its page."),
    (b"<html", "is a web page, not a model", "Download the file itself, not its page."),
    (b"GGUF", "is a GGUF file, which is not supported", "Use the .safetensors version."),
)


@dataclass(frozen=True)
class TensorFile:
    """The header of a safetensors file; no tensor has been read.

    Args:
        path: The file.
        shapes: Key → shape of every tensor.
        metadata: Free text entries of the file's writer.
        take_ahead: `TensorReadAhead.take` of a thread whose tensors are taken first, or None.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, str] = field(default_factory=dict)
    take_ahead: Callable[[Path, str, torch.dtype | None, Any], Any] | None = None

    def dtype(self) -> torch.dtype | None:
        """Return the dtype of the first tensor, or None for a file without tensors."""
        first = list(self.shapes)[:1]
        return next((tensor.dtype for tensor in self.read(first).values()), None)

    def read(
        self, keys: Iterable[str], dtype: torch.dtype | None = None, device: Any = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Read tensors.

        Args:
            keys: Keys of the tensors.
            dtype: Cast floating-point tensors to this; None keeps the file's.
            device: Of the returned tensors.

        Raises:
            CheckpointError: The file has changed or can no longer be read.
        """
        from safetensors import SafetensorError, safe_open

        tensors = {}
        try:
            with safe_open(str(self.path), framework="pt", device="cpu") as handle:
                for key in keys:
                    if self.take_ahead is not None:
                        ahead = self.take_ahead(self.path, key, dtype, device)
                        if ahead is not None:
                            tensors[key] = ahead
                            continue
                    tensor = handle.get_tensor(key)
                    wanted = dtype if tensor.is_floating_point() else None
                    # Copy, because mapped weights would change when the file is overwritten.
                    tensors[key] = tensor.to(device=device, dtype=wanted, copy=True)
        except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as exc:
            raise CheckpointError(f"{self.path} cannot be read: {exc}.", _DOWNLOAD_AGAIN) from exc
        return tensors


def open_tensor_file(path: Path) -> TensorFile:
    """Read the header of a safetensors file.

    The safetensors library decides whether the file is valid. This module only examines refused
    files, to say what they are.

    Raises:
        CheckpointError: The path is missing, is a pickle, or is not a whole safetensors file.
    """
    refuse_pickle(path)
    try:
        with open_regular(path, limit_bytes=MAX_FILE_BYTES, limit_s=_LOOK_LIMIT_S) as handle:
            # Open first: the library would wait for a pipe.
            return _read_header(path, handle)
    except FileNotFoundError as exc:
        raise CheckpointError(f"There is no file {path}.", "Check the path.") from exc
    except UnsafeFileError as exc:
        raise CheckpointError(exc.message, "Choose a .safetensors file.") from exc
    except OSError as exc:
        raise CheckpointError(
            f"{path} cannot be opened: {exc.strerror or exc}.", "Check its name and permissions."
        ) from exc


def refuse_pickle(path: Path) -> None:
    """Refuse a file with a suffix of pickles.

    Raises:
        CheckpointError: The suffix is one of `PICKLE_SUFFIXES`.
    """
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise _pickle_error(path)


def _pickle_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a pickle, and opening a pickle runs whatever code is inside.",
        "Use the .safetensors version of this model, or convert it to safetensors once on a"
        " machine that you can spare; OneDiff never needs --disable-safe-unpickle.",
    )


def _read_header(path: Path, handle: BinaryIO) -> TensorFile:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            return TensorFile(path, shapes, file.metadata() or {})
    except SafetensorError as exc:
        raise _what_it_is(path, handle, exc) from exc


def _what_it_is(path: Path, handle: BinaryIO, refusal_reason: Exception) -> CheckpointError:
    """Return an error that says what a refused file is."""
    size_bytes = handle.seek(0, os.SEEK_END)
    if size_bytes == 0:
        return CheckpointError(f"{path} is empty (0 bytes).", _DOWNLOAD_AGAIN)
    handle.seek(0)
    start = handle.read(64)
    header_bytes = int.from_bytes(start[:8], "little")
    # Check this first: a header's length may begin with any byte, also a pickle's first byte.
    if header_bytes <= _MAX_HEADER_BYTES and start[8:].lstrip()[:1] == b"{":
        needed_bytes = 8 + header_bytes
        if size_bytes >= needed_bytes:
            handle.seek(8)
            needed_bytes += _end_of_tensors(handle.read(header_bytes))
        if size_bytes < needed_bytes:
            return CheckpointError(
                f"{path} is cut short: it has {size_bytes:,} of at least {needed_bytes:,} bytes.",
                _DOWNLOAD_AGAIN,
            )
        return CheckpointError(
            f"{path} has a damaged safetensors header: {refusal_reason}.", _DOWNLOAD_AGAIN
        )
    if start[:2] == b"PK" or start[:1] == b"\x80":
        return _pickle_error(path)
    for magic, what, hint in _MAGIC:
        if start.lstrip()[: len(magic)].lower() == magic.lower():
            return CheckpointError(f"{path} {what}.", hint)
    return CheckpointError(
        f"{path} is not a safetensors file.", "Choose a Stable Diffusion .safetensors file."
    )


def _end_of_tensors(header: bytes) -> int:
    """Return the end of the last tensor in bytes after the header; 0 if it cannot be read."""
    if len(header) > _MAX_DIAGNOSED_BYTES:
        return 0
    try:
        entries = json.loads(header).values()
        ends = [
            entry["data_offsets"][1]
            for entry in entries
            if isinstance(entry, dict) and "data_offsets" in entry
        ]
        return max((end for end in ends if isinstance(end, int)), default=0)
    except _DAMAGE:
        return 0
