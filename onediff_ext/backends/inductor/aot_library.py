"""AOTInductor libraries: the format of graphs on a CPU.

A graph is a shared library with compiled C++, so loading it needs no compiler.
`standalone_compile`, the format on GPUs, would compile its C++ again at each load.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from onediff_ext.backends.inductor.compiler_files import reused_compiler_files
from onediff_ext.core.errors import BackendError
from onediff_ext.engine.backend_port import Graph

# Inductor settings that change the generated code; they are part of every key.
CPU_CONFIG: Mapping[str, Any] = {
    # Kernels read the number of threads at run time, so one graph serves any number.
    "cpp.dynamic_threads": True,
}
# Folder of a build's files in Inductor's cache. Its usual name has 52 characters, and so have two
# more names below it: Windows allows 247 for the path of a folder.
_OUTPUT = {"aot_inductor.output_path": "g"}
_loads = itertools.count()
_PREFIX, _SUFFIX = "onediff-graph-", ".so"
_LEFT_AGE_S = 3600.0  # a younger file may be one that is about to be loaded


def build_library(graph_module: torch.fx.GraphModule, fakes: list[torch.Tensor]) -> bytes:
    """Compile a graph into a shared library and return the library's bytes.

    Args:
        graph_module: Takes the weights, then the inputs, all flattened.
        fakes: Fake tensors for its inputs, with symbolic shapes.

    Raises:
        BackendError: AOTInductor returned no library.
    """
    from torch._inductor import aot_compile, config

    options: dict[str, Any] = dict(_OUTPUT)
    if hasattr(config.aot_inductor, "enable_line_tables"):  # torch 2.13; profilers of C++ read them
        options["aot_inductor.enable_line_tables"] = False
    with config.patch(dict(CPU_CONFIG)), reused_compiler_files():
        library = aot_compile(graph_module, tuple(fakes), options=options)
    if not isinstance(library, str):
        raise BackendError(f"AOTInductor returned {type(library).__name__} instead of a library.")
    return Path(library).read_bytes()


def load_library(payload: bytes) -> Graph:
    """Load what `build_library` returned."""
    # The raw runner takes 0.5 ms for each graph and does not import Inductor.
    with library_path(payload) as path:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1)

    def run(arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return runner.run(list(arguments))

    return run


@contextlib.contextmanager
def library_path(payload: bytes) -> Iterator[str]:
    """Give a path to load a library from, within this ``with`` block.

    The library lies in memory where the system allows it, so a killed process leaves no file.
    """
    try:
        descriptor = os.memfd_create("onediff-graph")
    except (AttributeError, OSError):  # not Linux, or forbidden
        _remove_left()
        descriptor, path = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX)
    else:
        path = ""
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as library:
            library.write(payload)
        if path:
            os.close(descriptor)
        yield path or f"/proc/{os.getpid()}/fd/{_unique_prefix()}{descriptor}"
    finally:
        if not path:
            os.close(descriptor)
        else:
            with contextlib.suppress(OSError):  # Windows keeps a loaded library's file
                os.unlink(path)


@functools.cache
def _remove_left() -> None:
    """Delete the files of earlier processes, once in this one.

    Windows refuses to delete those that a living process has loaded.
    """
    latest = time.time() - _LEFT_AGE_S
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < latest:
                path.unlink()


def _unique_prefix() -> str:
    """Return path steps that lead nowhere and differ at every call.

    The loader (glibc compares names first) returns an already loaded library for a known path,
    and the system soon reuses a descriptor's number. Without this prefix one kind got another
    kind's code.
    """
    return "".join("./" if bit == "0" else ".//" for bit in f"{next(_loads):b}")
