"""A stored graph with our kernels runs without any compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from onediff_ext.backends.inductor.backend import InductorBackend

pytestmark = pytest.mark.gpu

# The program of a process that draws.
DRAW = """
import sys
from pathlib import Path
import torch
from onediff_ext.backends.inductor.backend import InductorBackend

folder = Path(sys.argv[1])
arguments = torch.load(folder / "arguments.pt", weights_only=True)
graph = InductorBackend().load((folder / "graph.bin").read_bytes(), torch.device("cuda"))
(output,) = graph(arguments)
torch.save(output, folder / "output.pt")
"""


class Block(nn.Module):
    """A block whose norms and GEGLU become our kernels in a graph for a GPU."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        x = functional.silu(functional.group_norm(x, 32, scale, shift, 1e-5))
        tokens = x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 64)
        value, gate = functional.layer_norm(tokens, (64,), scale, shift, 1e-5).chunk(2, dim=-1)
        return value * functional.gelu(gate)


def test_loading_and_running_needs_no_compiler(tmp_path: Path) -> None:
    device = torch.device("cuda")
    x = torch.randn(2, 64, 24, 16, device=device, dtype=torch.float16)
    x = x.contiguous(memory_format=torch.channels_last)
    scale, shift = torch.randn(2, 64, device=device, dtype=torch.float16)
    height, width = (torch.export.Dim(name, min=2, max=512) for name in ("height", "width"))
    program = torch.export.export(
        Block(), (x, scale, shift), dynamic_shapes=({2: height, 3: width}, None, None)
    )
    (tmp_path / "graph.bin").write_bytes(InductorBackend().build(program, device))
    arguments = [torch.randn(2, 64, 40, 72, device=device, dtype=torch.float16), scale, shift]
    arguments[0] = arguments[0].contiguous(memory_format=torch.channels_last)
    torch.save(arguments, tmp_path / "arguments.pt")
    caches = tmp_path / "caches"

    done = subprocess.run(
        [sys.executable, "-c", DRAW, str(tmp_path)],
        env={
            **{name: value for name, value in os.environ.items() if name not in ("CC", "CXX")},
            "PATH": "",
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        },
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    libraries = [path.name for path in caches.rglob("*.so")]
    assert libraries == []
    found = torch.load(tmp_path / "output.pt", weights_only=True)
    expected = Block()(*(argument.double() for argument in arguments))
    error = (found.double() - expected).norm() / expected.norm()
    assert error < 3e-3
