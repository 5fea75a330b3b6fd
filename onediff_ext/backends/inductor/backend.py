"""The backend that compiles with PyTorch's Inductor.

Graphs have one format for each device, because neither format serves both
(docs/architecture.md has the figures): an AOTInductor library on a CPU (`aot_library.py`), a
`standalone_compile` artefact on a GPU (`standalone_artefact.py`). Both load without a compiler.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from onediff_ext.backends.inductor import flash_attention
from onediff_ext.backends.inductor.aot_library import CPU_CONFIG, build_library, load_library
from onediff_ext.backends.inductor.standalone_artefact import (
    CUDA_CONFIG,
    TUNED_CONFIG,
    build_artefact,
    can_be_tuned,
    load_artefact,
)
from onediff_ext.backends.inductor.triton_package import missing_reason
from onediff_ext.core.errors import BackendError
from onediff_ext.engine.backend_port import Backend, Graph
from onediff_ext.engine.export.exporter import input_fakes
from onediff_ext.engine.torch_versions import OLDEST_FOR_GRAPHS, too_old_for_graphs

# The oldest versions that were tried (docs/torch-versions.md). Export needs 2.6;
# standalone_compile came with 2.8.
_OLDEST_TORCH = {"cpu": OLDEST_FOR_GRAPHS, "cuda": (2, 8)}

# 600 modules, two seconds together. Each imports those above, and takes at most 0.5 s.
_IMPORTED_BY_LOADS = (
    "torch._inductor.codecache",
    "torch._inductor.decomposition",
    "networkx",
    "torch._functorch.aot_autograd",
    "torch._dynamo.testing",
    "torch._inductor.scheduler",
    "torch._inductor.codegen.triton",
    "torch._inductor.select_algorithm",
    "torch._inductor.lowering",
    "torch._inductor.compile_fx",
    "torch._inductor.standalone_compile",
)

_FLASH_OPERATOR = "onediff_ext.backends.inductor.kernels.flash_attention"

# Raise this whenever the kernels in `backends/inductor/kernels` or `code_choices.py` change.
KERNELS = "11"


class InductorBackend(Backend):
    """Compiles with Inductor. Only building needs a C++ compiler (CPU) or Triton (GPU)."""

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
            "inductor settings": _in_words(settings),
        }
        if device.type == "cuda":
            entries["kernels"] = KERNELS
            entries["float32 matmul"] = torch.get_float32_matmul_precision()
            if (attention := flash_attention.key_entry(device)) is not None:
                entries["attention"] = attention
        return entries

    def loading_steps(self, device: torch.device) -> Sequence[Callable[[], object]]:
        if device.type != "cuda":
            return ()
        steps: list[Callable[[], object]] = [
            partial(_import, name) for name in _IMPORTED_BY_LOADS if name not in sys.modules
        ]
        if not _checksum_of_torch.cache_info().currsize:
            steps.append(_checksum_of_torch)
        return steps

    def tuning(self, device: torch.device) -> str | None:
        if device.type != "cuda" or not can_be_tuned():
            return None
        return _in_words(TUNED_CONFIG)

    def build(self, program: torch.export.ExportedProgram, device: torch.device) -> bytes:
        return self._build(program, device, CUDA_CONFIG)

    def build_tuned(self, program: torch.export.ExportedProgram, device: torch.device) -> bytes:
        return self._build(program, device, TUNED_CONFIG)

    def _build(
        self,
        program: torch.export.ExportedProgram,
        device: torch.device,
        settings: Mapping[str, Any],
    ) -> bytes:
        # The graph's own fake tensors, never real ones: real tensors make the weights' shapes
        # symbolic, which is slower and gives one kind another kind's code.
        import torch.fx.experimental._config as symbolic_config

        fakes = input_fakes(program)
        try:
            with torch.no_grad(), symbolic_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
                if device.type != "cuda":
                    return build_library(program.graph_module, fakes)
                from onediff_ext.backends.inductor.kernels.flash_attention import flash_kernels
                from onediff_ext.backends.inductor.kernels.rewrite import with_kernels

                graph_module = with_kernels(program.graph_module)
                artefact = build_artefact(graph_module, fakes, settings)
                kernels = flash_kernels(graph_module)
                return flash_attention.with_stored(artefact, kernels) if kernels else artefact
        except BackendError:
            raise
        except Exception as exc:  # Inductor raises many unrelated types
            raise BackendError(f"Inductor failed: {type(exc).__name__}: {exc}") from exc

    def load(self, payload: bytes, device: torch.device) -> Graph:
        try:
            if device.type != "cuda":
                return load_library(payload)
            several = torch.cuda.device_count() > 1
            artefact, kernels = flash_attention.without_stored(payload)
            if kernels is not None:
                importlib.import_module(_FLASH_OPERATOR)  # registers it
                flash_attention.use_stored(kernels)
            return load_artefact(artefact, (device.index or 0) if several else None)
        except Exception as exc:
            raise BackendError(f"The stored graph cannot be loaded: {exc}") from exc


def _in_words(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in sorted(settings.items()))


def _import(name: str) -> None:
    with contextlib.suppress(ImportError):  # a load imports what this torch has instead
        importlib.import_module(name)


@cache
def _checksum_of_torch() -> None:
    """Compute the checksum of torch's own sources, which torch keeps for later loads."""
    importlib.import_module("torch._inductor.codecache").torch_key()
