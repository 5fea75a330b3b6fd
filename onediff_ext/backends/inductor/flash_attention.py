"""FlashAttention 4 for self-attention in graphs, where a user has installed it (Hopper GPUs).

It is a library of kernels that compiles each of them once for a dtype and a head width, for any
number of tokens. A worker compiles them and stores each beside the graph as a shared library. A
process that draws loads these in milliseconds; it imports neither FlashAttention nor its compiler,
which takes seconds.

Source: the package flash-attn-4, https://github.com/Dao-AILab/flash-attention; Shah et al. 2024,
"FlashAttention-3", arXiv:2407.08608, whose algorithm it has on Hopper.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from onediff_ext.backends.inductor.aot_library import library_path
from onediff_ext.engine.machine import cpu_flags_digest
from onediff_ext.engine.torch_versions import OutOfMemoryError

logger = logging.getLogger(__name__)

PACKAGE = "flash-attn-4"
INSTALL = f'pip install "{PACKAGE}[cu13]>=4.0.0b36,<4.1"'
# A kernel of one version may not run with another version of these.
_COMPILERS = ("nvidia-cutlass-dsl", "apache-tvm-ffi")

# Versions are those of its betas: 4.0.0b36 is the first one that was tried.
_TRIED, _UNTRIED = (4, 0, 0, 36), (4, 1)
_HOPPER = (9, 0)
_BOUNDARY_BYTES = 16  # of addresses and strides that the GPU's tensor memory accelerator reads
_MARK = b"onediff-flash-attention\n"
_LENGTH_BYTES = 8
NAME = "attention"
_COMPILER_PACKAGE = "nvidia_cutlass_dsl"

Function = Callable[..., Any]


class Kernel(NamedTuple):
    """A kernel is compiled for these.

    Args:
        dtype: Of queries, keys and values.
        width: Channels of a head.
    """

    dtype: torch.dtype
    width: int


class Argument(Enum):
    """What a kernel is called with, besides constants."""

    Q, K, V, OUT, SCALE = range(5)


class StoredKernel(NamedTuple):
    """A compiled kernel.

    Args:
        code: A shared library, or an object file, which only the compiler's package loads.
        is_linked: Whether it is a shared library.
        runtime: The library that it needs, below the folder of the compiler's package.
        arguments: Of its function, in order; all but those of `Argument` are constants.
    """

    code: bytes
    is_linked: bool
    runtime: str
    arguments: tuple[Any, ...]


def version(device: torch.device) -> str | None:
    """Return the version that graphs use on a device, or None when they use PyTorch's attention.

    Args:
        device: Where graphs run.
    """
    return _installed() if is_for(device) else None


def is_for(device: torch.device) -> bool:
    """Whether graphs on a device would use the library if it were installed.

    Args:
        device: Where graphs run.
    """
    return (
        sys.platform.startswith("linux")
        and device.type == "cuda"
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) == _HOPPER
    )


def key_entry(device: torch.device) -> str | None:
    """Return what decides a graph's stored kernels, for its key; None as `version`.

    The compiler writes a kernel's host code for the CPU that it runs on; another one may lack its
    instructions.

    Args:
        device: Where graphs run.
    """
    if version(device) is None:
        return None
    versions = [f"{name} {_version_of(name)}" for name in (PACKAGE, *_COMPILERS)]
    return ", ".join([*versions, f"cpu {cpu_flags_digest()}"])


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(q · kᵀ · scale) · v, by PyTorch where the kernel is missing or fails.

    Args:
        q: [B, H, T, D].
        k, v: [B, H, S, D].
        scale: Factor of the products, above zero.

    Returns:
        [B, H, T, D], in memory as [B, T, H, D].
    """
    kernel = Kernel(q.dtype, q.shape[-1])
    function = _loaded.get(kernel)
    if function is not None:
        try:
            return function(q, k, v, scale)
        except OutOfMemoryError:
            raise
        except Exception:
            _loaded[kernel] = None
            logger.warning(
                "FlashAttention failed; PyTorch's attention is used instead", exc_info=True
            )
    out = scaled_dot_product_attention(q, k, v, scale=scale)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def with_stored(artefact: bytes, kernels: Mapping[Kernel, StoredKernel]) -> bytes:
    """Return an artefact's bytes together with the kernels that its graph calls."""
    text = pickle.dumps(dict(kernels))
    return _MARK + len(text).to_bytes(_LENGTH_BYTES, "big") + text + artefact


def without_stored(payload: bytes) -> tuple[bytes, Mapping[Kernel, StoredKernel] | None]:
    """Return what `with_stored` was given; None for the kernels of bytes without its mark."""
    if not payload.startswith(_MARK):
        return payload, None
    start = len(_MARK) + _LENGTH_BYTES
    end = start + int.from_bytes(payload[len(_MARK) : start], "big")
    return payload[end:], pickle.loads(payload[start:end])


def use_stored(kernels: Mapping[Kernel, StoredKernel]) -> None:
    """Load stored kernels, once in a process. Those that cannot be loaded are done without.

    Args:
        kernels: From `without_stored`.
    """
    for kernel, stored in kernels.items():
        if kernel not in _loaded:
            try:
                _loaded[kernel] = partial(_mixed, _function_of(stored), stored.arguments)
            except Exception:
                _loaded[kernel] = None
                logger.warning(
                    "A kernel of FlashAttention cannot be loaded; PyTorch's attention is used",
                    exc_info=True,
                )


# In this process; None for what does not work.
_loaded: dict[Kernel, Callable[..., torch.Tensor] | None] = {}


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


def _mixed(
    function: Function,
    arguments: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Call a kernel. All tensors are [B, H, T, D]."""
    q, k, v = (_readable(tensor.transpose(1, 2)) for tensor in (q, k, v))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    given = {
        Argument.Q: q, Argument.K: k, Argument.V: v, Argument.OUT: out, Argument.SCALE: scale,
    }  # fmt: skip
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        function(*(given[a] if isinstance(a, Argument) else a for a in arguments))
    return out.transpose(1, 2)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where the GPU could not read it in blocks."""
    *strides, last = tensor.stride()
    size = tensor.element_size()
    is_aligned = not any(number * size % _BOUNDARY_BYTES for number in strides)
    if last == 1 and 0 not in strides and is_aligned and not tensor.data_ptr() % _BOUNDARY_BYTES:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def compiler_folder() -> Path:
    """Return the folder of the package whose library kernels need.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    spec = importlib.util.find_spec(_COMPILER_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{_COMPILER_PACKAGE} is not installed.")
    return Path(next(iter(spec.submodule_search_locations)))


def _function_of(stored: StoredKernel) -> Function:
    with tempfile.TemporaryDirectory(prefix="onediff-") as folder:
        if not stored.is_linked:
            path = Path(folder) / "kernel.o"
            path.write_bytes(stored.code)
            runtime = importlib.import_module("cutlass.cute.runtime")
            function: Function = getattr(runtime.load_module(str(path), enable_tvm_ffi=True), NAME)
            return function
        tvm_ffi = importlib.import_module("tvm_ffi")
        # Its symbols are for libraries that are loaded later.
        ctypes.CDLL(str(compiler_folder() / stored.runtime), mode=ctypes.RTLD_GLOBAL)
        path = Path(folder) / "kernel.so"  # tvm-ffi knows libraries by this ending
        with library_path(stored.code) as library:
            path.symlink_to(library)
            function = tvm_ffi.load_module(str(path))[NAME]
    return function
