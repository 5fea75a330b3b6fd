"""Artefacts of `torch._inductor.standalone_compile`: the format of graphs on a GPU.

An artefact contains the compiled device code of its kernels, so loading it compiles nothing.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from onediff_ext.backends.inductor.code_choices import our_choices
from onediff_ext.backends.inductor.device_index import loading_for
from onediff_ext.core.forks import fork_safe_lock
from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.torch_versions import ready_for_standalone_compile

_CONFIG: Mapping[str, Any] = {
    # Otherwise a kernel writes its best launch settings into the folder where it was built. A
    # worker removes that folder; the drawing process would create it again and leave it behind.
    "autotune_local_cache": False,
    # Otherwise each process that draws tries several launch settings for a kernel at its first
    # call: a tenth of a second for each kernel, 4.6 s for SDXL (H200, torch 2.11).
    "triton.autotune_pointwise": False,
    # Otherwise our own kernels load through Triton, which has gcc compile a launcher for each of
    # them in the process that draws (docs/architecture.md).
    "static_launch_user_defined_triton_kernels": True,
    # Otherwise each process that draws chooses among block sizes for a reduction at its first call:
    # a norm of 64 or 128 channels ran with one row for each program (61 us instead of 12, H200).
    # Sums may be rounded in another order in each process, too.
    "deterministic": True,
}
_WINDOWS_CONFIG: Mapping[str, Any] = {
    # Kernels give their names to files. With the names of their operators in them, Triton's paths
    # would get longer than the 260 characters that Windows allows.
    "triton.descriptive_names": False,
}


def cuda_config(platform: str) -> Mapping[str, Any]:
    """Return the Inductor settings that change the generated code; they are part of every key.

    Args:
        platform: A value of `sys.platform`.
    """
    return {**_CONFIG, **_WINDOWS_CONFIG} if platform == "win32" else _CONFIG


CUDA_CONFIG = cuda_config(sys.platform)
# What takes too long while somebody waits: matrix products and convolutions are chosen among
# libraries and Triton kernels by their times. That is measured while the graph is built. What
# Inductor would measure in each process that draws stays off: `deterministic` would switch both
# off, so its part for reductions stands here by itself.
TUNED_CONFIG: Mapping[str, Any] = {
    **CUDA_CONFIG,
    "deterministic": False,
    "test_configs.force_filter_reduction_configs": True,
    "max_autotune_gemm": True,
}
# Settings that torch 2.8 does not have.
_NEWER = frozenset({"deterministic", "test_configs.force_filter_reduction_configs"})
# Older torch versions change a setting for all threads, so two threads must not load at once.
_loading = fork_safe_lock()


def can_be_tuned() -> bool:
    """Whether this torch has all settings of `TUNED_CONFIG`."""
    from torch._inductor import config

    return all(map(partial(_has, config), _NEWER))


def build_artefact(
    graph_module: torch.fx.GraphModule,
    fakes: list[Any],
    settings: Mapping[str, Any] = CUDA_CONFIG,
) -> bytes:
    """Compile a graph and return the artefact's bytes.

    A CPU can build and run artefacts too, but it compiles their C++ again at each load.

    Args:
        graph_module: Takes the weights, then the inputs, all flattened.
        fakes: Fake tensors for its inputs, with symbolic shapes.
        settings: `CUDA_CONFIG` or `TUNED_CONFIG`.
    """
    from torch._inductor import config, standalone_compile

    ready_for_standalone_compile(graph_module)
    known = {k: v for k, v in settings.items() if k not in _NEWER or _has(config, k)}
    # Inductor's pool of compiler processes does not take our settings over: once a process has one,
    # our own kernels would be left out of the artefact.
    with config.patch({**known, "compile_threads": 1}), our_choices():
        artefact = standalone_compile(graph_module, fakes, dynamic_shapes="from_graph")
    with tempfile.TemporaryDirectory(prefix="onediff-") as folder:
        path = Path(folder) / "graph.bin"
        artefact.save(path=str(path), format="binary")
        return path.read_bytes()


def load_artefact(payload: bytes, index: int | None = None) -> Graph:
    """Load what `build_artefact` returned.

    Args:
        payload: From `build_artefact`.
        index: Number of the GPU to run on; None for the one that it was built on.
    """
    from torch._inductor import CompiledArtifact  # type: ignore[attr-defined]

    with tempfile.TemporaryDirectory(prefix="onediff-") as folder:
        path = Path(folder) / "graph.bin"
        path.write_bytes(payload)
        place = contextlib.nullcontext() if index is None else loading_for(index)
        with _without_compilers(), place:
            artefact = CompiledArtifact.load(path=str(path), format="binary")

    def run(arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        outputs = artefact(*arguments)
        return outputs if isinstance(outputs, (list, tuple)) else (outputs,)

    return run


def _has(config: Any, setting: str) -> bool:
    found = reduce(lambda at, name: getattr(at, name, None), setting.split("."), config)
    return found is not None


@contextlib.contextmanager
def _without_compilers() -> Iterator[None]:
    """Load Triton kernels without Inductor's pool of compiler processes, and without a checksum.

    Otherwise the first load starts one process for each core, which stays until the end. The
    kernels are already compiled, so the pool has nothing to do. It also reads all of Triton's
    files for a checksum that names entries of caches that are off here.
    """
    import torch.utils._triton as triton_of_torch
    from torch._inductor import config

    with (
        _loading,
        config.patch(compile_threads=1),
        mock.patch.object(triton_of_torch, "triton_hash_with_backend", return_value=""),
    ):
        yield
