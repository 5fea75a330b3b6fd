"""PyTorch's Inductor: one stored artefact for each kind, loaded without any compiler.

Two forms, because neither serves both devices (docs/architecture.md has the figures):
on a GPU the artefact of `standalone_compile`, whose kernels are device code; on a CPU
an AOTInductor library, since `standalone_compile` would compile its C++ again at load.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from onediff_ext.backends.inductor.device_index import loading_for
from onediff_ext.backends.inductor.triton_package import missing_reason
from onediff_ext.core.errors import BackendError
from onediff_ext.engine.backend_port import Backend, Graph
from onediff_ext.engine.export.exporter import input_fakes
from onediff_ext.engine.torch_versions import (
    OLDEST_FOR_GRAPHS,
    ready_for_standalone_compile,
    too_old_for_graphs,
)

# The oldest that this was tried with (docs/torch-versions.md): torch.export takes what it has to
# from 2.6 on, and standalone_compile came with 2.8.
_OLDEST_TORCH = {"cpu": OLDEST_FOR_GRAPHS, "cuda": (2, 8)}

# Inductor settings that change the code it makes; they are part of every key.
CPU_CONFIG: Mapping[str, Any] = {
    # Kernels ask for the number of threads when they run, so that a graph serves any.
    "cpp.dynamic_threads": True,
}
CUDA_CONFIG: Mapping[str, Any] = {
    # A kernel would note its best launch settings in the folder where it was built, which a
    # worker removes; drawing made that folder anew and left it behind.
    "autotune_local_cache": False,
    # Several launch settings for a kernel would be tried out in each process that draws, at its
    # first call: a tenth of a second for each kernel, 4.6 s for SDXL (H200, torch 2.11).
    "triton.autotune_pointwise": False,
    # Our own kernels would be loaded through Triton, which has gcc compile a launcher for each of
    # them in the process that draws (docs/architecture.md).
    "static_launch_user_defined_triton_kernels": True,
}
_loads = itertools.count()
# Older torch changes a setting for all threads: they must not undo each other's changes.
_loading = threading.Lock()

# Raised whenever the kernels in `backends/inductor/kernels` change.
KERNELS = "7"


class InductorBackend(Backend):
    """Compiles with Inductor; needs a C++ compiler on CPUs and Triton on GPUs, to build only."""

    name = "inductor"

    def unavailable_reason(self, device: torch.device) -> str | None:
        needed = _OLDEST_TORCH.get(device.type)
        if needed is None:
            return f"graphs for {device.type} devices are not supported"
        too_old = too_old_for_graphs(needed)
        if too_old is None and device.type == "cuda":
            return missing_reason()
        return too_old

    def key_entries(self, device: torch.device) -> Mapping[str, str]:
        settings = CUDA_CONFIG if device.type == "cuda" else CPU_CONFIG
        entries = {
            "backend": "inductor",
            "inductor settings": " ".join(f"{k}={v}" for k, v in sorted(settings.items())),
        }
        if device.type == "cuda":
            entries["kernels"] = KERNELS
            entries["float32 matmul"] = torch.get_float32_matmul_precision()
        return entries

    def prepare_to_load(self, device: torch.device) -> None:
        if device.type == "cuda":
            # What loading a graph takes in with it otherwise: 600 modules, a second or more.
            for name in ("codecache", "standalone_compile", "async_compile", "compile_fx"):
                importlib.import_module(f"torch._inductor.{name}")
            # And a checksum of torch's own sources.
            importlib.import_module("torch._inductor.codecache").torch_key()

    def build(self, program: torch.export.ExportedProgram, device: torch.device) -> bytes:
        # The graph's own fake tensors, never real ones: those would make the weights'
        # shapes symbolic, which is slower and hands out one kind's code for another's.
        import torch.fx.experimental._config as symbolic_config

        fakes = input_fakes(program)
        try:
            with torch.no_grad(), symbolic_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
                if device.type == "cuda":
                    return _build_cuda(program.graph_module, fakes)
                return _build_cpu(program.graph_module, fakes)
        except BackendError:
            raise
        except Exception as exc:  # Inductor raises many unrelated types
            raise BackendError(f"Inductor failed: {type(exc).__name__}: {exc}") from exc

    def load(self, payload: bytes, device: torch.device) -> Graph:
        try:
            if device.type != "cuda":
                return _load_cpu(payload)
            several = torch.cuda.device_count() > 1
            return load_standalone(payload, (device.index or 0) if several else None)
        except Exception as exc:
            raise BackendError(f"The stored graph cannot be loaded: {exc}") from exc


def _build_cpu(graph_module: torch.fx.GraphModule, fakes: list[torch.Tensor]) -> bytes:
    from torch._inductor import aot_compile, config

    with config.patch(dict(CPU_CONFIG)):
        library = aot_compile(graph_module, tuple(fakes))
    if not isinstance(library, str):
        raise BackendError(f"AOTInductor gave {type(library).__name__} in place of a library.")
    return Path(library).read_bytes()


def _load_cpu(payload: bytes) -> Graph:
    # The raw runner: 0.5 ms for each graph, and Inductor is not even imported.
    with _as_library(payload) as path:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1)

    def run(arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        return runner.run(list(arguments))[0]

    return run


@contextlib.contextmanager
def _as_library(payload: bytes) -> Iterator[str]:
    """A path to load a library from; in memory where the system can, so that nothing is left of
    a process that is killed."""
    try:
        descriptor = os.memfd_create("onediff-graph")
    except (AttributeError, OSError):  # not Linux, or forbidden
        descriptor, path = tempfile.mkstemp(prefix="onediff-", suffix=".so")
    else:
        path = ""
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as library:
            library.write(payload)
        if path:
            os.close(descriptor)
        yield path or f"/proc/{os.getpid()}/fd/{_unlike_any_before()}{descriptor}"
    finally:
        if not path:
            os.close(descriptor)
        else:
            with contextlib.suppress(OSError):  # Windows keeps a loaded library's file
                os.unlink(path)


def _unlike_any_before() -> str:
    """Steps of a path that lead nowhere, and are other ones at every call.

    The loader takes a library whose path it has seen before for the one that it has loaded
    (glibc compares names first), and a descriptor's number is soon in use again: one kind was
    then handed another one's code.
    """
    return "".join("./" if bit == "0" else ".//" for bit in f"{next(_loads):b}")


def _build_cuda(graph_module: torch.fx.GraphModule, fakes: list[Any]) -> bytes:
    from onediff_ext.backends.inductor.kernels.rewrite import with_kernels

    return standalone_artefact(with_kernels(graph_module), fakes)


def standalone_artefact(graph_module: torch.fx.GraphModule, fakes: list[Any]) -> bytes:
    """The form for GPUs; a CPU can make it too, and then compiles C++ again at each load."""
    from torch._inductor import config, standalone_compile

    ready_for_standalone_compile(graph_module)
    with config.patch(dict(CUDA_CONFIG)):
        artefact = standalone_compile(graph_module, fakes, dynamic_shapes="from_graph")
    with tempfile.TemporaryDirectory(prefix="onediff-") as folder:
        path = Path(folder) / "graph.bin"
        artefact.save(path=str(path), format="binary")
        return path.read_bytes()


def load_standalone(payload: bytes, index: int | None = None) -> Graph:
    """What `standalone_artefact` made, as a callable.

    Args:
        payload: From `standalone_artefact`.
        index: Of the GPU to run it on; None for the one that it was built on.
    """
    from torch._inductor import CompiledArtifact  # type: ignore[attr-defined]

    with tempfile.TemporaryDirectory(prefix="onediff-") as folder:
        path = Path(folder) / "graph.bin"
        path.write_bytes(payload)
        place = contextlib.nullcontext() if index is None else loading_for(index)
        with _without_compilers(), place:
            artefact = CompiledArtifact.load(path=str(path), format="binary")

    def run(arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        output = artefact(*arguments)
        first: torch.Tensor = output[0] if isinstance(output, (list, tuple)) else output
        return first

    return run


@contextlib.contextmanager
def _without_compilers() -> Iterator[None]:
    """Where Triton's kernels come ready made.

    Whatever loads one starts a process for each core otherwise, to compile what might be missing:
    beside the picture that is being drawn, and for good.
    """
    from torch._inductor import config

    with _loading, config.patch(compile_threads=1):
        yield
