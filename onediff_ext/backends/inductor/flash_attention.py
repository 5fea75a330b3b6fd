"""FlashAttention 4 for self-attention in graphs, where a user has installed it (Hopper GPUs).

It is a library of kernels that compiles each of them once for a dtype and a head width, for any
number of tokens. A worker stores what it has compiled beside the graph, so that a process that
draws compiles nothing.

Source: the package flash-attn-4, https://github.com/Dao-AILab/flash-attention; Shah et al. 2024,
"FlashAttention-3", arXiv:2407.08608, whose algorithm it has on Hopper.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from onediff_ext.engine.torch_versions import OutOfMemoryError

logger = logging.getLogger(__name__)

PACKAGE = "flash-attn-4"
INSTALL = f'pip install "{PACKAGE}[cu13]>=4.0.0b36,<4.1"'
DTYPES = (torch.float16, torch.bfloat16)
MOST_WIDTH = 256
# What `import flash_attn.cute` takes most of its second for.
_IMPORTED = ("cutlass.base_dsl", "cutlass", "flash_attn.cute")
# An object file of one version may not run with another version of these.
_COMPILERS = ("nvidia-cutlass-dsl", "apache-tvm-ffi")

# Versions are those of its betas: 4.0.0b36 is the first one that was tried.
_TRIED, _UNTRIED = (4, 0, 0, 36), (4, 1)
_HOPPER = (9, 0)
_BOUNDARY_BYTES = 16  # of addresses and strides that the GPU's tensor memory accelerator reads
_MARK = b"onediff-flash-attention\n"
_LENGTH_BYTES = 8
_SAMPLE_TOKENS = 128
_FILE, _NAME = "kernel.o", "attention"

Attention = Callable[..., Any]


class Kernel(NamedTuple):
    """A kernel is compiled for these.

    Args:
        dtype: Of queries, keys and values; one of `DTYPES`.
        width: Channels of a head.
    """

    dtype: torch.dtype
    width: int


class StoredKernel(NamedTuple):
    """A compiled kernel.

    Args:
        key: The library's own key for it, pickled.
        code: Its object file.
    """

    key: bytes
    code: bytes


def version(device: torch.device | None = None) -> str | None:
    """Return the version that graphs use on a device, or None when they use PyTorch's attention.

    Args:
        device: A GPU; None for the current one.
    """
    return _installed() if is_for(device) else None


def is_for(device: torch.device | None = None) -> bool:
    """Whether graphs on a device would use the library if it were installed.

    Args:
        device: A GPU; None for the current one.
    """
    return (
        sys.platform.startswith("linux")
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) == _HOPPER
    )


def key_entry(device: torch.device) -> str | None:
    """Return what decides a graph's stored kernels, for its key; None as `version`.

    Args:
        device: A GPU.
    """
    if version(device) is None:
        return None
    return ", ".join(f"{name} {_version_of(name)}" for name in (PACKAGE, *_COMPILERS))


def loading_steps(device: torch.device) -> list[Callable[[], object]]:
    """Return the imports of the first call, as `Backend.loading_steps`.

    Args:
        device: A GPU.
    """
    if version(device) is None:
        return []
    return [partial(_import, name) for name in _IMPORTED if name not in sys.modules]


def is_fit(dtype: torch.dtype, width: int) -> bool:
    """Whether there are kernels for heads of this width in this dtype."""
    return dtype in DTYPES and 8 <= width <= MOST_WIDTH and width % 8 == 0


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(q · kᵀ · scale) · v, by PyTorch if the library does not work.

    Args:
        q: [B, H, T, D], for which `is_fit`.
        k, v: [B, H, S, D].
        scale: Factor of the products, above zero.

    Returns:
        [B, H, T, D], in memory as [B, T, H, D].
    """
    function = _library.function
    if function is not None:
        try:
            return _mixed(function, q, k, v, scale).transpose(1, 2)
        except OutOfMemoryError:
            raise
        except Exception:
            _library.leave("failed")
    out = scaled_dot_product_attention(q, k, v, scale=scale)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def with_stored(artefact: bytes, kernels: Iterable[Kernel], device: torch.device) -> bytes:
    """Return an artefact's bytes together with the kernels that its graph calls.

    Args:
        artefact: Of the graph.
        kernels: Compiled here if they are not yet.
        device: The GPU for which they are.
    """
    made = {kernel: _compiled(kernel, device) for kernel in kernels}
    text = pickle.dumps({kernel: found for kernel, found in made.items() if found is not None})
    return _MARK + len(text).to_bytes(_LENGTH_BYTES, "big") + text + artefact


def without_stored(payload: bytes) -> tuple[bytes, Mapping[Kernel, StoredKernel] | None]:
    """Return what `with_stored` was given and what it added; None for bytes without its mark."""
    if not payload.startswith(_MARK):
        return payload, None
    start = len(_MARK) + _LENGTH_BYTES
    end = start + int.from_bytes(payload[len(_MARK) : start], "big")
    return payload[end:], pickle.loads(payload[start:end])


def use_stored(stored: Mapping[Kernel, StoredKernel]) -> None:
    """Have the library use stored kernels. What it cannot use it compiles at its first call.

    Args:
        stored: From `without_stored`.
    """
    for kernel in stored.keys() - _library.kernels:
        if _library.function is None:
            return
        try:
            key = pickle.loads(stored[kernel].key)
            compiled = _forward().compile_cache
            if key not in compiled:
                compiled[key] = _loaded(stored[kernel].code)
            _library.kernels.add(kernel)
        except Exception:
            logger.warning("A stored kernel of FlashAttention cannot be used", exc_info=True)


class _Library:
    """The library in this process. After a failure it is left alone.

    Attributes:
        kernels: Those that were loaded from a store.
    """

    def __init__(self) -> None:
        self.kernels: set[Kernel] = set()
        self._is_left = False

    @property
    def function(self) -> Attention | None:
        """Computes attention of [B, T, H, D]; None where the library does not work."""
        if self._is_left:
            return None
        try:
            function: Attention = importlib.import_module("flash_attn.cute").flash_attn_func
        except Exception:  # its imports load a compiler
            self.leave("cannot be imported")
            return None
        return function

    def leave(self, what: str) -> None:
        """Use PyTorch's attention from now on; called where an exception is handled."""
        self._is_left = True
        logger.warning("FlashAttention %s; PyTorch's attention is used", what, exc_info=True)


_library = _Library()


@cache
def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _installed() -> str | None:
    found = _version_of(PACKAGE)
    if found is None:
        return None
    return found if _TRIED <= _numbers(found) < _UNTRIED else None


def _numbers(text: str) -> tuple[int, ...]:
    """Return (4, 0, 0, 36) for "4.0.0b36"; a release without a beta comes after its betas."""
    release, _, beta = text.partition("b")
    numbers = [int(part) for part in release.split(".") if part.isdigit()]
    return (*numbers, int(beta) if beta.isdigit() else 10**6)


def _import(name: str) -> None:
    with contextlib.suppress(Exception):  # the first call says why
        importlib.import_module(name)


def _forward() -> Any:
    """The library's forward, which has its compiled kernels by the keys of the library."""
    return importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd


def _mixed(
    function: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    # [B, H, T, D] → [B, T, H, D]
    rows = [_readable(tensor.transpose(1, 2)) for tensor in (q, k, v)]
    with torch.no_grad(), torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        found = function(*rows, softmax_scale=scale)
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where the GPU could not read it in blocks."""
    *strides, last = tensor.stride()
    size = tensor.element_size()
    is_aligned = not any(number * size % _BOUNDARY_BYTES for number in strides)
    if last == 1 and 0 not in strides and is_aligned and not tensor.data_ptr() % _BOUNDARY_BYTES:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@cache
def _compiled(kernel: Kernel, device: torch.device) -> StoredKernel | None:
    """Compile a kernel; None if the library does not work, or gives no object file."""
    function = _library.function
    if function is None:
        return None
    try:
        forward = _forward()
        others = forward.compile_cache
        forward.compile_cache = type(others)()
        try:
            shape = (1, 1, _SAMPLE_TOKENS, kernel.width)
            sample = torch.zeros(shape, dtype=kernel.dtype, device=device)
            _mixed(function, sample, sample, sample, 1.0)
            ((key, made),) = forward.compile_cache.cache.items()
        finally:
            forward.compile_cache = others
        others[key] = made
        with tempfile.TemporaryDirectory(prefix="onediff-") as folder:
            path = Path(folder) / _FILE
            made.export_to_c(object_file_path=str(path), function_name=_NAME)
            return StoredKernel(pickle.dumps(key), path.read_bytes())
    except OutOfMemoryError:
        raise
    except Exception:
        logger.warning("A kernel of FlashAttention cannot be stored", exc_info=True)
        return None


def _loaded(code: bytes) -> Any:
    runtime = importlib.import_module("cutlass.cute.runtime")
    with tempfile.TemporaryDirectory(prefix="onediff-") as folder:
        path = Path(folder) / _FILE
        path.write_bytes(code)
        return getattr(runtime.load_module(str(path), enable_tvm_ffi=True), _NAME)
