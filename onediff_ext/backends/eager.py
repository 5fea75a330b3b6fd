"""The backend that compiles nothing: it runs the exported program operator by operator.

It is slower than the block itself and serves as the reference. Everything that holds for a
compiled graph (identity, storage, checks, weights as arguments) can be tested with it in
milliseconds and without a compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onediff_ext.core.errors import BackendError
from onediff_ext.engine.backend_port import Backend, Graph
from onediff_ext.engine.export.exporter import is_channels_last, load_program, save_program
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

    def load(self, payload: bytes, device: torch.device) -> Graph:  # noqa: ARG002
        try:
            graph_module = _with_exact_norms(load_program(payload).graph_module)
        except Exception as exc:
            raise BackendError(f"The stored program cannot be read: {exc}") from exc

        def run(arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            outputs: Sequence[torch.Tensor] = graph_module(*arguments)
            return outputs

        return run


def _with_exact_norms(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Put `_group_norm` in the place of torch's GroupNorm.

    Args:
        graph_module: An exported program, which is changed.

    Returns:
        The same.
    """
    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.target is torch.ops.aten.group_norm.default:
                    node.target = _group_norm
            module.recompile()
    return graph_module


def _group_norm(x: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
    """torch's GroupNorm, which on a CPU reads images in NCHW order.

    Graphs take images in NHWC order. The CPU's kernel for it loses three digits where much of an
    image has one colour, as under a mask (torch 2.13). Hosts hand it images in NCHW order.
    """
    if x.device.type != "cpu" or not is_channels_last(x):
        return torch.group_norm(x, *arguments, **named)
    normed = torch.group_norm(x.contiguous(), *arguments, **named)
    return normed.contiguous(memory_format=torch.channels_last)
