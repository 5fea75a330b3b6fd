"""Compiles FlashAttention's kernels in a worker: see `flash_attention`."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache, partial
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
# Batch, tokens and heads. The second is no multiple of the first, and several blocks of the GPU.
_SAMPLES = ((1, 128, 1), (2, 1000, 3))
_SAMPLE_SCALE = 0.625
_NOT_LINKED = "A kernel of FlashAttention is not linked, so its compiler is imported to load it"
_ERROR_CHARACTERS = 500


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
        library = _linked(object_file)
        code = object_file if library is None else library
        return StoredKernel(code, library is not None, _runtime(), arguments)
    except OutOfMemoryError:
        raise
    except Exception:  # its imports load compilers
        logger.warning("FlashAttention cannot be used for %s", kernel, exc_info=True)
        return None


def _compiled(
    function: Function, kernel: Kernel, device: torch.device
) -> tuple[bytes, tuple[Any, ...]]:
    """The object file of a kernel, and what the library calls it with.

    Raises:
        ValueError: For another size the library calls it in another way, or calls another kernel.
    """
    forward = importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
    calls: list[tuple[Any, ...]] = []
    ways = []
    others = forward.compile_cache
    forward.compile_cache = type(others)()
    try:
        call = partial(_call_sample, function, kernel, device)
        call(_SAMPLES[0])
        ((key, made),) = forward.compile_cache.cache.items()
        forward.compile_cache[key] = lambda *arguments: calls.append(arguments)
        for sample in _SAMPLES:
            calls.clear()
            names = call(sample)
            (arguments,) = calls
            ways.append([_named(argument, names) for argument in arguments])
    finally:
        forward.compile_cache = others
    first, second = ways
    if first != second:
        raise ValueError(f"The library calls its kernel with {first}, then with {second}.")
    if set(Argument) != {argument for argument in first if isinstance(argument, Argument)}:
        raise ValueError(f"The library calls its kernel with {first}.")
    with tempfile.TemporaryDirectory(prefix="onediff-") as folder:
        path = Path(folder) / "kernel.o"
        made.export_to_c(object_file_path=str(path), function_name=NAME)
        return path.read_bytes(), tuple(first)


def _call_sample(
    function: Function, kernel: Kernel, device: torch.device, sample: tuple[int, int, int]
) -> dict[int, Argument]:
    """Call the library's function; return the names of its tensors by their addresses."""
    shape = (*sample, kernel.width)
    q, k, v = (torch.zeros(shape, dtype=kernel.dtype, device=device) for _ in range(3))
    with torch.no_grad(), torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        out = function(q, k, v, softmax_scale=_SAMPLE_SCALE)
    out = out[0] if isinstance(out, tuple) else out
    return {
        q.data_ptr(): Argument.Q, k.data_ptr(): Argument.K, v.data_ptr(): Argument.V,
        out.data_ptr(): Argument.OUT,
    }  # fmt: skip


def _named(argument: Any, names: Mapping[int, Argument]) -> Any:
    """What stands for an argument: a plain value, or its name.

    Raises:
        ValueError: It is none of these. A process that draws could not read it.
    """
    if isinstance(argument, torch.Tensor):
        return names[argument.data_ptr()]
    if isinstance(argument, tuple):
        return tuple(_named(each, names) for each in argument)
    if argument is None or isinstance(argument, (bool, int, float, str)):
        return Argument.SCALE if argument == _SAMPLE_SCALE else argument
    raise ValueError(f"The library calls its kernel with a {type(argument).__name__}.")


def _linked(object_file: bytes) -> bytes | None:
    """A shared library of an object file; None, with a warning, without a C compiler that links.

    It needs no file of the machine that links it. Where a symbol is missing its load fails, not
    its first call, which would end the process.
    """
    wanted = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    linker = next((found for name in wanted if name and (found := shutil.which(name))), None)
    if linker is None:
        logger.warning("%s: there is no C compiler", _NOT_LINKED)
        return None
    with tempfile.TemporaryDirectory(prefix="onediff-") as folder:
        source, target = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        source.write_bytes(object_file)
        command = [linker, "-shared", "-nostdlib", "-Wl,-z,now", "-o", str(target), str(source)]
        done = subprocess.run(command, check=False, capture_output=True)
        if done.returncode:
            error = done.stderr.decode(errors="replace").strip()
            logger.warning("%s: %s", _NOT_LINKED, error[-_ERROR_CHARACTERS:])
            return None
        return target.read_bytes()


def _runtime() -> str:
    """The library of the compiler's package that kernels need, below the package's folder."""
    runtime = importlib.import_module("cutlass.cute.runtime")
    (found,) = runtime.find_runtime_libraries(enable_tvm_ffi=False)
    return Path(found).relative_to(compiler_folder()).as_posix()
