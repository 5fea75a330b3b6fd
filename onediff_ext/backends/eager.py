"""The backend that compiles nothing: it runs the exported program operator by operator.

It is slower than the block itself and serves as the reference. Everything that holds for a
compiled graph (identity, storage, checks, weights as arguments) can be tested with it in
milliseconds and without a compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from onediff_ext.core.errors import BackendError
from onediff_ext.engine.backend_port import Backend, Graph
from onediff_ext.engine.export.exporter import load_program, save_program
from onediff_ext.engine.torch_versions import too_old_for_graphs


class EagerBackend(Backend):
    """Runs the exported operators one by one."""

    name = "eager"

    def unavailable_reason(self, device: torch.device) -> str | None:  # noqa: ARG002
        return too_old_for_graphs()

    def key_entries(self, device: torch.device) -> Mapping[str, str]:  # noqa: ARG002
        return {"backend": "eager"}

    def build(
        self,
        program: torch.export.ExportedProgram,
        device: torch.device,  # noqa: ARG002
    ) -> bytes:
        return save_program(program)

    def load(self, payload: bytes, device: torch.device) -> Graph:
        # A GPU's program names the GPU on which it was traced.
        wanted = device if device.type == "cuda" else None
        try:
            graph_module = load_program(payload, wanted).graph_module
        except Exception as exc:
            raise BackendError(f"The stored program cannot be read: {exc}") from exc

        def run(arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            outputs: Sequence[torch.Tensor] = graph_module(*arguments)
            return outputs

        return run
