"""The backend that runs blocks through OneFlow's static graphs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence

import torch

from onediff_ext.backends.oneflow.availability import unavailable_reason
from onediff_ext.backends.oneflow.program import FlowProgram
from onediff_ext.backends.oneflow.static_graphs import process_plans
from onediff_ext.core.errors import BackendError
from onediff_ext.engine.backend_port import Backend, Graph
from onediff_ext.engine.export.exporter import load_program, save_program
from onediff_ext.engine.torch_versions import too_old_for_graphs

# Raised whenever a stored program would be run in another way.
_SCHEMA = "1"


class OneFlowBackend(Backend):
    """Keeps exported programs; OneFlow makes a graph of one at the first call of each shape.

    OneFlow 0.9 cannot save a planned graph, so that the program is all there is to keep.
    """

    name = "oneflow"
    capturable = False  # it works on streams of its own

    @property
    def needs_restart(self) -> bool:  # type: ignore[override]
        return process_plans.cache_info().currsize > 0 and process_plans().broken is not None

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
            # Functional operators, and autocast as casts that stand in the program.
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

        def run(arguments: Sequence[torch.Tensor]) -> torch.Tensor:
            return process_plans().run(program, arguments)

        return run
