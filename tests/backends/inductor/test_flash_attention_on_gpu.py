"""The library itself, on a GPU for which graphs use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from onediff_ext.backends.inductor import flash_attention, flash_compiler
from onediff_ext.backends.inductor.backend import InductorBackend

pytestmark = pytest.mark.gpu

# The program of a process that draws.
DRAW = """
import sys
from pathlib import Path
import torch
from onediff_ext.backends.inductor import flash_attention
from onediff_ext.backends.inductor.backend import InductorBackend

folder, device = Path(sys.argv[1]), torch.device("cuda")
arguments = [a.cuda() for a in torch.load(folder / "arguments.pt", weights_only=True)]
graph = InductorBackend().load((folder / "graph.bin").read_bytes(), device)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream), torch.no_grad():
    (called,) = graph(arguments)
    stream.synchronize()
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording, stream=stream):
        (replayed,) = graph(arguments)
    recording.replay()
stream.synchronize()
assert torch.equal(called, replayed)
assert flash_attention._loaded
assert None not in flash_attention._loaded.values()  # no kernel has failed
assert not {"flash_attn.cute", "cutlass"} & sys.modules.keys()
torch.save(called.cpu(), folder / "output.pt")
"""


@pytest.fixture(autouse=True)
def _library() -> None:
    if flash_attention.version(torch.device("cuda")) is None:
        pytest.skip("flash-attn-4 is not installed, or the GPU is no Hopper GPU")


class Block(nn.Module):
    """A layer of self-attention."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in nn.functional.linear(x, weight).chunk(3, dim=-1)
        )
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", flash_compiler.DTYPES)
@pytest.mark.parametrize("width", [40, 64, 80, 128, 160])
@pytest.mark.parametrize("tokens", [1, 77, 333 + 2700, 4096])
def test_it_computes_attention(dtype: torch.dtype, width: int, tokens: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, tokens, 3, width, device="cuda", dtype=dtype, generator=generator)
        for _ in range(3)
    )
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    kernel = flash_attention.Kernel(dtype, width)
    stored = flash_compiler.compiled(kernel, q.device)
    assert stored is not None
    flash_attention.use_stored({kernel: stored})
    found = flash_attention.attend(q, k, v, width**-0.5)
    expected = scaled_dot_product_attention(q.double(), k.double(), v.double())
    error = (found.double() - expected).norm() / expected.norm()
    assert error < (1e-3 if dtype is torch.float16 else 6e-3)
    assert flash_attention._loaded[kernel] is not None  # it has not failed


def test_a_kernel_that_is_not_linked_computes_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "_loaded", {})
    monkeypatch.setattr(flash_compiler, "_linked", lambda object_file: None)
    kernel = flash_attention.Kernel(torch.float16, 64)
    stored = flash_compiler.compiled.__wrapped__(kernel, torch.device("cuda"))
    assert stored is not None
    assert not stored.is_linked
    flash_attention.use_stored({kernel: stored})
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 3, 333, 64, device="cuda", generator=generator).half() for _ in range(3)
    )
    found = flash_attention.attend(q, k, v, 0.125)
    expected = scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert (found.double() - expected).norm() <= 1e-3 * expected.norm()
    assert flash_attention._loaded[kernel] is not None  # it has not failed


def test_a_stored_graph_compiles_no_kernel(tmp_path: Path) -> None:
    device = torch.device("cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(768, 256, device=device, generator=generator).half() / 16
    x = torch.randn(2, 60, 256, device=device, generator=generator).half()
    tokens = torch.export.Dim("tokens", min=2, max=8192)
    program = torch.export.export(Block(), (x, weight), dynamic_shapes=({1: tokens}, None))
    payload = InductorBackend().build(program, device)
    _, kernels = flash_attention.without_stored(payload)
    assert kernels is not None
    assert set(kernels) == {flash_attention.Kernel(torch.float16, 64)}
    assert all(stored.is_linked for stored in kernels.values())
    (tmp_path / "graph.bin").write_bytes(payload)
    x = torch.randn(3, 1234, 256, generator=torch.Generator().manual_seed(1)).half()
    torch.save([x, weight.cpu()], tmp_path / "arguments.pt")

    done = subprocess.run(
        [sys.executable, "-c", DRAW, str(tmp_path)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},
        cwd=Path(__file__).parents[3],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "FlashAttention" not in done.stderr  # no warning
    found = torch.load(tmp_path / "output.pt", weights_only=True)
    expected = Block()(x.double(), weight.cpu().double())
    assert (found.double() - expected).norm() <= 3e-3 * expected.norm()
