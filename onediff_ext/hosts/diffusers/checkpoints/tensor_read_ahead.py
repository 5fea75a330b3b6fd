"""Reads a checkpoint's tensors to the device in a thread, while libraries are imported."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.hosts.diffusers.checkpoints.ldm_config_from_shapes import UNET_PREFIX, VAE_PREFIX
from onediff_ext.hosts.diffusers.checkpoints.tensor_file import open_tensor_file

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# In the order in which a checkpoint's components are read. Others, such as EMA weights, are unused.
_PREFIXES = ("cond_stage_model.", "conditioner.embedders.", VAE_PREFIX, UNET_PREFIX)


class TensorReadAhead:
    """Tensors of a single-file checkpoint, read before somebody asks for them.

    It is a speed-up only: after any error it has no tensors. The loader then reads the file itself
    and reports the error.

    Args:
        path: A .safetensors file in the original (LDM) layout.
        dtype: Of floating-point tensors; None keeps the file's.
        device: Of the tensors.
        without_vae: Another file has the VAE.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype | None,
        device: torch.device,
        *,
        without_vae: bool = False,
    ) -> None:
        self._path = path = path.expanduser()
        self._dtype, self._device = dtype, device
        self._prefixes = [p for p in _PREFIXES if p != VAE_PREFIX or not without_vae]
        self._read: dict[str, torch.Tensor] = {}
        self._keys: set[str] | None = None  # None until the header is read
        self._change = threading.Condition()
        self._is_over = False
        self._state = _state_of(path)
        # A daemon: Ctrl-C does not wait for it.
        self._thread = threading.Thread(target=self._run, name="onediff-weights", daemon=True)
        self._thread.start()

    def take(self, path: Path, key: str, dtype: torch.dtype | None, device: Any) -> Any:
        """Return a tensor, and forget it; None if it was not read.

        Args:
            path, dtype, device: What is asked for: another file, dtype or device has nothing here.
            key: Of the tensor.
        """
        import torch

        if (path, dtype, torch.device(device)) != (self._path, self._dtype, self._device):
            return None
        with self._change:
            self._change.wait_for(lambda: self._is_known(key))
            return self._read.pop(key, None)

    def _is_known(self, key: str) -> bool:
        if self._is_over or key in self._read:
            return True
        return self._keys is not None and key not in self._keys

    def is_current(self) -> bool:
        """Return whether the file is the one that was read."""
        return self._state is not None and self._state == _state_of(self._path)

    def close(self) -> None:
        """Stop reading and forget all tensors."""
        with self._change:
            self._is_over = True
            self._read.clear()
            self._change.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._read_all()
        except Exception as exc:
            # The loader reads the file again and reports the error. The tensors free their memory.
            logger.debug("Weights were not read ahead: %s", exc)
            with self._change:
                self._read.clear()
        finally:
            with self._change:
                self._is_over = True
                self._change.notify_all()

    def _read_all(self) -> None:
        from safetensors import safe_open

        file = open_tensor_file(self._path)  # refuses pipes, pickles and damaged files
        keys = [key for prefix in self._prefixes for key in file.shapes if key.startswith(prefix)]
        with self._change:
            self._keys = set(keys)
            self._change.notify_all()
        with safe_open(str(self._path), framework="pt", device="cpu") as handle:
            for key in keys:
                tensor = handle.get_tensor(key)
                wanted = self._dtype if tensor.is_floating_point() else None
                placed = tensor.to(device=self._device, dtype=wanted, copy=True)
                with self._change:
                    if self._is_over:
                        return
                    self._read[key] = placed
                    self._change.notify_all()


def _state_of(path: Path) -> tuple[int, int, int] | None:
    """Return what differs when a file is replaced or changed; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
