"""Compiles FlashAttention's kernels in a worker: see `flash_attention`."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from onediff_ext.backends.inductor.flash_attention import (
    NAME,
    Argument,
    Function,
    Kernel,
    StoredKernel,
    compiler_folder,
    version,
)
from onediff_ext.engine.torch_versions import OutOfMemoryError

logger = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16)
MOST_WIDTH = 256
_SAMPLE_TOKENS, _SAMPLE_SCALE = 128, 0.625


def has_flash_attention(dtype: torch.dtype, width: int, device: torch.device) -> bool:
    """Whether there is a kernel; it is compiled if it is not yet.

    Args:
        dtype: Of queries, keys and values.
        width: Channels of a head.
        device: Where they are.
    """
    is_fit = dtype in DTYPES and 8 <= width <= MOST_WIDTH and width % 8 == 0
    if not is_fit or version(device) is None:
        return False
    return compiled(Kernel(dtype, width), device) is not None


@cache
def compiled(kernel: Kernel, device: torch.device) -> StoredKernel | None:
    """Compile a kernel for a GPU; None, with a warning, where that does not work.

    It imports the library and its compiler. Only workers should.

    Args:
        kernel: What it is for.
        device: The GPU.
    """
    try:
        function = importlib.import_module("flash_attn.cute").flash_attn_func
        object_file, arguments = _compiled(function, kernel, device)
        return StoredKernel(_linked(object_file), _runtime(), arguments)
    except OutOfMemoryError:
        raise
    except Exception:  # its imports load compilers
        logger.warning("FlashAttention cannot be used for %s", kernel, exc_info=True)
        return None


def _compiled(
    function: Function, kernel: Kernel, device: torch.device
) -> tuple[bytes, tuple[Any, ...]]:
    """The object file of a kernel, and what the library calls it with."""
    forward = importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
    shape = (1, _SAMPLE_TOKENS, 1, kernel.width)
    q, k, v = (torch.zeros(shape, dtype=kernel.dtype, device=device) for _ in range(3))
    calls: list[tuple[Any, ...]] = []
    others = forward.compile_cache
    forward.compile_cache = type(others)()
    try:
        with torch.no_grad(), torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
            function(q, k, v, softmax_scale=_SAMPLE_SCALE)
            ((key, made),) = forward.compile_cache.cache.items()
            forward.compile_cache[key] = lambda *arguments: calls.append(arguments)
            out = function(q, k, v, softmax_scale=_SAMPLE_SCALE)
    finally:
        forward.compile_cache = others
    out = out[0] if isinstance(out, tuple) else out
    names = {
        q.data_ptr(): Argument.Q, k.data_ptr(): Argument.K, v.data_ptr(): Argument.V,
        out.data_ptr(): Argument.OUT,
    }  # fmt: skip
    arguments = tuple(_named(argument, names) for argument in calls[0])
    if set(Argument) != {argument for argument in arguments if isinstance(argument, Argument)}:
        raise ValueError(f"The library calls its kernel with {arguments}.")
    with tempfile.TemporaryDirectory(prefix="onediff-") as folder:
        path = Path(folder) / "kernel.o"
        made.export_to_c(object_file_path=str(path), function_name=NAME)
        return path.read_bytes(), arguments


def _named(argument: Any, names: Mapping[int, Argument]) -> Any:
    """What stands for an argument: a plain value, or its name."""
    if isinstance(argument, torch.Tensor):
        return names[argument.data_ptr()]
    if isinstance(argument, tuple):
        return tuple(_named(each, names) for each in argument)
    return Argument.SCALE if argument == _SAMPLE_SCALE else argument


def _linked(object_file: bytes) -> bytes:
    """A shared library of an object file, by the compiler that Triton needs too."""
    wanted = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    linker = next((found for name in wanted if name and (found := shutil.which(name))), None)
    if linker is None:
        raise FileNotFoundError("There is no C compiler to link with.")
    with tempfile.TemporaryDirectory(prefix="onediff-") as folder:
        source, target = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        source.write_bytes(object_file)
        subprocess.run(
            [linker, "-shared", "-o", str(target), str(source)], check=True, capture_output=True
        )
        return target.read_bytes()


def _runtime() -> str:
    """The library of the compiler's package that kernels need, below the package's folder."""
    runtime = importlib.import_module("cutlass.cute.runtime")
    (found,) = runtime.find_runtime_libraries(enable_tvm_ffi=False)
    return Path(found).relative_to(compiler_folder()).as_posix()
