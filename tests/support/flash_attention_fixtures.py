"""FlashAttention's stand-in in a process that has loaded nothing yet, and blocks that use it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from onediff_ext.backends.inductor import flash_attention, flash_compiler
from onediff_ext.backends.inductor.flash_attention import Kernel, StoredKernel
from onediff_ext.backends.inductor.kernels.rewrite_attention import rewrite_attention
from tests.support.flash_attention_stand_in import FlashAttentionStandIn

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
HALF = Kernel(torch.float16, 64)


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has neither loaded nor compiled a kernel."""
    start_process(monkeypatch)


@pytest.fixture
def flash_library(
    new_process: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> FlashAttentionStandIn:
    """The stand-in, where a shared library is an object file."""
    stand_in = FlashAttentionStandIn(tmp_path / "packages")
    stand_in.install(monkeypatch)
    monkeypatch.setattr(flash_compiler, "_linked", lambda object_file: object_file)
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: stand_in.opened.append(path))
    return stand_in


@pytest.fixture
def install_flash(
    new_process: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., None]]:
    """Pretend that a version is installed, on a GPU of a compute capability."""

    def install(
        found: str | None, capability: tuple[int, int] = (9, 0), compilers: str = "4.7.1"
    ) -> None:
        def version(package: str) -> str:
            if found is None:
                raise metadata.PackageNotFoundError(package)
            return found if package == flash_attention.PACKAGE else compilers

        flash_attention._version_of.cache_clear()
        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    monkeypatch.setattr(sys, "platform", "linux")
    # Graphs of these tests are for a CPU.
    monkeypatch.setattr(flash_compiler, "version", lambda device: flash_attention.version(CUDA))
    yield install
    flash_attention._version_of.cache_clear()


def start_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process has loaded and compiled."""
    monkeypatch.setattr(flash_attention, "_loaded", {})
    flash_compiler.compiled.cache_clear()


def stored() -> StoredKernel:
    """The kernel of a head with 64 channels, as a worker stores it."""
    made = flash_compiler.compiled(HALF, CPU)
    assert made is not None
    return made


def load() -> None:
    """Load it, as a process that draws does."""
    flash_attention.use_stored({HALF: stored()})


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("it does not work here")


def tensors(*, tokens: int = 40, width: int = 64) -> list[torch.Tensor]:
    """Queries, keys and values as a block has them: [B, H, T, D], in memory as [B, T, H, D]."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, tokens, 3, width, generator=generator).half().transpose(1, 2)
        for _ in range(3)
    ]


def assert_attention(
    found: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    expected = scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.2)
    assert found.shape == q.shape
    assert found.transpose(1, 2).is_contiguous()
    assert (found.double() - expected).norm() <= 1e-3 * expected.norm()


class AttentionBlock(nn.Module):
    """Attention as a block has it."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mixed = scaled_dot_product_attention(q, k, v, **self.given)
        return mixed.transpose(1, 2).flatten(2) * 2


def rewritten(block: nn.Module, *arguments: torch.Tensor) -> torch.fx.GraphModule:
    """A block's graph for any number of tokens, with its attention rewritten."""
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(block, arguments, dynamic_shapes=({2: tokens},) * 3)
    graph = program.graph_module
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten.scaled_dot_product_attention.default:
            rewrite_attention(node)
    graph.recompile()
    return graph
