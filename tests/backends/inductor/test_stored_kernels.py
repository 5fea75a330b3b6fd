"""A stored graph with our kernels runs without any compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import time
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

BUILD = """
import sys
from pathlib import Path
from tests.backends.inductor.test_stored_kernels import build, start_compiler_processes

start_compiler_processes()
build(Path(sys.argv[1]), tuned=TUNED)
"""


class Block(nn.Module):
    """A block whose norms and GEGLU become our kernels in a graph for a GPU, with a product."""

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        x = functional.silu(functional.group_norm(x, 32, scale, shift, 1e-5))
        tokens = x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 64)
        tokens = functional.linear(tokens, weight, shift)
        value, gate = functional.layer_norm(tokens, (64,), scale, shift, 1e-5).chunk(2, dim=-1)
        return value * functional.gelu(gate)


def start_compiler_processes() -> None:
    """Have Inductor's pool ready, as it is in a process that has used `torch.compile` before."""
    from torch._inductor.async_compile import AsyncCompile

    deadline = time.monotonic() + 120
    while not AsyncCompile.use_process_pool():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def build(folder: Path, *, tuned: bool) -> None:
    """Build the block's graph for a GPU, and save it with arguments of another size."""
    device = torch.device("cuda")
    x = torch.randn(2, 64, 24, 16, device=device, dtype=torch.float16)
    x = x.contiguous(memory_format=torch.channels_last)
    scale, shift = torch.randn(2, 64, device=device, dtype=torch.float16)
    weight = torch.randn(64, 64, device=device, dtype=torch.float16) / 8
    height, width = (torch.export.Dim(name, min=2, max=512) for name in ("height", "width"))
    program = torch.export.export(
        Block(),
        (x, scale, shift, weight),
        dynamic_shapes=({2: height, 3: width}, None, None, None),
    )
    backend = InductorBackend()
    made = (backend.build_tuned if tuned else backend.build)(program, device)
    (folder / "graph.bin").write_bytes(made)
    x = torch.randn(2, 64, 40, 72, device=device, dtype=torch.float16)
    arguments = [x, scale, shift, weight]
    arguments[0] = arguments[0].contiguous(memory_format=torch.channels_last)
    torch.save(arguments, folder / "arguments.pt")


def run_child(program: str, folder: Path, caches: Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env={
            **os.environ,
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            **environment,
        },
        cwd=Path(__file__).parents[3],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("tuned", [False, True])
def test_loading_and_running_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuned: bool
) -> None:
    program = BUILD.replace("TUNED", str(tuned))
    run_child(program, tmp_path, tmp_path / "build", TORCHINDUCTOR_COMPILE_THREADS="4")
    arguments = torch.load(tmp_path / "arguments.pt", weights_only=True)
    caches = tmp_path / "caches"
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)

    run_child(DRAW, tmp_path, caches, PATH="")

    libraries = [path.name for path in caches.rglob("*.so")]
    assert libraries == []
    found = torch.load(tmp_path / "output.pt", weights_only=True)
    expected = Block()(*(argument.double() for argument in arguments))
    error = (found.double() - expected).norm() / expected.norm()
    assert error < 3e-3
