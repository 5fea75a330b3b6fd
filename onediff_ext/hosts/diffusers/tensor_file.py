"""A safetensors file: its keys, shapes and metadata, with clear refusals of anything else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

PICKLE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")

_MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library itself accepts."""

_DAMAGE = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError
)  # fmt: skip
"""What a header raises that is no safetensors header."""

_DOWNLOAD_AGAIN = "Download the file again, and compare its size with the source's."

_MAGIC = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the model", "Run `git lfs pull`."),
    (b"<!DOCTYPE", "is a web page, not a model", "Download the file itself, not its page."),
    (b"<html", "is a web page, not a model", "Download the file itself, not its page."),
    (b"GGUF", "is a GGUF file, which is not supported", "Use the .safetensors version."),
)


@dataclass(frozen=True)
class TensorFile:
    """What the header of a safetensors file says; no tensor has been read.

    Args:
        path: The file.
        shapes: Key → shape of every tensor.
        metadata: Free text entries that the file's writer added.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def dtype(self) -> torch.dtype | None:
        """Return the dtype of the first tensor, None for a file without tensors."""
        first = list(self.shapes)[:1]
        return next((tensor.dtype for tensor in self.read(first).values()), None)

    def read(
        self, keys: Iterable[str], dtype: torch.dtype | None = None, device: Any = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Read tensors.

        Args:
            keys: Which ones.
            dtype: Cast floating-point tensors to this; None keeps the file's.
            device: Where they go.

        Raises:
            CheckpointError: The file changed or cannot be read any more.
        """
        from safetensors import SafetensorError, safe_open

        tensors = {}
        try:
            with safe_open(str(self.path), framework="pt", device="cpu") as handle:
                for key in keys:
                    tensor = handle.get_tensor(key)
                    wanted = dtype if tensor.is_floating_point() else None
                    # A copy: otherwise the weights change when the file is written again.
                    tensors[key] = tensor.to(device=device, dtype=wanted, copy=True)
        except (SafetensorError, OSError) as exc:
            raise CheckpointError(f"{self.path} cannot be read: {exc}.", _DOWNLOAD_AGAIN) from exc
        return tensors


def open_tensor_file(path: Path) -> TensorFile:
    """Read the header of a safetensors file.

    Raises:
        CheckpointError: The path is missing, is a pickle, or is not a whole safetensors file.
    """
    refuse_pickle(path)
    if not path.is_file():
        raise CheckpointError(f"There is no file {path}.", "Check the path.")
    try:
        return _read_header(path)
    except OSError as exc:
        raise CheckpointError(
            f"{path} cannot be opened: {exc.strerror}.", "Check its permissions."
        ) from exc


def refuse_pickle(path: Path) -> None:
    """Refuse a file whose name says that it is a pickle.

    Raises:
        CheckpointError: It is one.
    """
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise _pickle_error(path)


def _pickle_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a pickle, and opening a pickle runs whatever code is inside.",
        "Use the .safetensors version of this model, or convert it to safetensors once on a"
        " machine that you can spare; OneDiff never needs --disable-safe-unpickle.",
    )


def _read_header(path: Path) -> TensorFile:
    size_bytes = path.stat().st_size
    if size_bytes == 0:
        raise CheckpointError(f"{path} is empty (0 bytes).", _DOWNLOAD_AGAIN)
    with path.open("rb") as handle:
        start = handle.read(64)
        if start[:2] == b"PK" or start[:1] == b"\x80":
            raise _pickle_error(path)
        for magic, what, hint in _MAGIC:
            if start.lstrip()[: len(magic)].lower() == magic.lower():
                raise CheckpointError(f"{path} {what}.", hint)
        header_bytes = int.from_bytes(start[:8], "little")
        if len(start) < 8 or header_bytes > _MAX_HEADER_BYTES or start[8:9] not in (b"{", b""):
            raise CheckpointError(
                f"{path} is not a safetensors file.", "Choose a Stable Diffusion .safetensors file."
            )
        handle.seek(8)
        text = handle.read(header_bytes)
    if len(text) < header_bytes:
        raise _truncated(path, 8 + header_bytes, size_bytes)
    try:
        header: dict[str, Any] = json.loads(text)
        metadata = dict(header.pop("__metadata__", None) or {})
        shapes = {key: tuple(map(int, entry["shape"])) for key, entry in header.items()}
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except _DAMAGE as exc:
        raise CheckpointError(
            f"{path} has a damaged safetensors header: {exc}.", _DOWNLOAD_AGAIN
        ) from exc
    needed_bytes = 8 + header_bytes + end
    if size_bytes < needed_bytes:
        raise _truncated(path, needed_bytes, size_bytes)
    return TensorFile(path, shapes, metadata)


def _truncated(path: Path, needed_bytes: int, size_bytes: int) -> CheckpointError:
    return CheckpointError(
        f"{path} is cut short: it has {size_bytes:,} of at least {needed_bytes:,} bytes.",
        _DOWNLOAD_AGAIN,
    )
