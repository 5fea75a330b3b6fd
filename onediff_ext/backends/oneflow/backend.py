"""The backend that runs blocks through OneFlow's static graphs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence

import torch

from onediff_ext.backends.oneflow.availability import unavailable_reason
from onediff_ext.backends.oneflow.program import FlowProgram
from onediff_ext.backends.oneflow.static_graphs import process_graphs
from onediff_ext.core.errors import BackendError
from onediff_ext.engine.backend_port import Backend, Graph
from onediff_ext.engine.export.exporter import load_program, save_program
from onediff_ext.engine.torch_versions import too_old_for_graphs

# Raise this whenever a stored program would run differently.
_SCHEMA = "1"


class OneFlowBackend(Backend):
    """Stores exported programs; OneFlow plans a graph at the first call of each shape.

    OneFlow 0.9 cannot save a planned graph, so only the program is stored.
    """

    name = "oneflow"
    capturable = False  # it uses its own streams

    @property
    def needs_restart(self) -> bool:  # type: ignore[override]
        return process_graphs.cache_info().currsize > 0 and process_graphs().broken is not None

    def unavailable_reason(self, device: torch.device) -> str | None:
        return too_old_for_graphs() or unavailable_reason(device)

    def key_entries(self, device: torch.device) -> Mapping[str, str]:  # noqa: ARG002
        try:
            version = importlib.metadata.version("oneflow")
        except importlib.metadata.PackageNotFoundError:
            version = "absent"
        return {"backend": "oneflow", "oneflow": version, "oneflow program": _SCHEMA}

    def build(self, program: torch.export.ExportedProgram, device: torch.device) -> bytes:  # noqa: ARG002
        try:
            # Use functional operators, and make autocast's casts explicit.
            program = program.run_decompositions({})
        except Exception as exc:
            raise BackendError(f"The program cannot be simplified: {exc}") from exc
        FlowProgram(program.graph_module)  # refuses operators that OneFlow lacks
        return save_program(program)

    def load(self, payload: bytes, device: torch.device) -> Graph:  # noqa: ARG002
        try:
            graph_module = load_program(payload).graph_module
        except Exception as exc:
            raise BackendError(f"The stored program cannot be read: {exc}") from exc
        program = FlowProgram(graph_module)

        def run(arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return (process_graphs().run(program, arguments),)

        return run
