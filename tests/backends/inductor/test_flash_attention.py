"""FlashAttention in graphs: when it is used, what is stored of it, and what happens without it."""

from __future__ import annotations

import importlib
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from onediff_ext.backends.inductor import flash_attention
from onediff_ext.backends.inductor.backend import InductorBackend
from onediff_ext.backends.inductor.flash_attention import Kernel
from onediff_ext.backends.inductor.kernels.flash_attention import kernels_of
from onediff_ext.backends.inductor.kernels.rewrite_attention import rewrite_attention
from tests.support.flash_attention_stand_in import FlashAttentionStandIn

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
HALF = Kernel(torch.float16, 64)


@pytest.fixture(autouse=True)
def _another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    start_process(monkeypatch)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FlashAttentionStandIn:
    stand_in = FlashAttentionStandIn()
    stand_in.install(monkeypatch)
    return stand_in


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
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
    yield install
    flash_attention._version_of.cache_clear()


def start_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process knows of the library."""
    monkeypatch.setattr(flash_attention, "_library", flash_attention._Library())
    flash_attention._compiled.cache_clear()


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


@pytest.mark.parametrize(
    ("version", "capability", "is_used"),
    [
        ("4.0.0b36", (9, 0), True),
        ("4.0.0b40", (9, 0), True),
        ("4.0.1", (9, 0), True),
        ("4.0.0b35", (9, 0), False),
        ("4.1.0", (9, 0), False),
        ("4.0.0b36", (8, 9), False),
        ("4.0.0b36", (10, 0), False),
        (None, (9, 0), False),
    ],
)
def test_where_graphs_use_it(
    installed: Callable[..., None], version: str | None, capability: tuple[int, int], is_used: bool
) -> None:
    installed(version, capability)
    assert flash_attention.version(CUDA) == (version if is_used else None)


def test_no_other_system_has_it(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("4.0.0b36")
    monkeypatch.setattr(sys, "platform", "win32")
    assert flash_attention.version(CUDA) is None


def test_graphs_with_and_without_it_are_different_graphs(installed: Callable[..., None]) -> None:
    backend = InductorBackend()
    installed(None)
    without = backend.key_entries(CUDA)
    installed("4.0.0b36")
    with_it = "flash-attn-4 4.0.0b36, nvidia-cutlass-dsl 4.7.1, apache-tvm-ffi 4.7.1"
    assert backend.key_entries(CUDA) == {**without, "attention": with_it}
    assert "attention" not in backend.key_entries(CPU)


def test_another_compiler_is_another_graph(installed: Callable[..., None]) -> None:
    backend = InductorBackend()
    installed("4.0.0b36")
    first = backend.key_entries(CUDA)
    installed("4.0.0b36", compilers="4.8.0")
    assert backend.key_entries(CUDA) != first


def test_its_imports_are_done_ahead(
    library: FlashAttentionStandIn,
    installed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = InductorBackend()
    installed(None)
    before = len(backend.loading_steps(CUDA))
    installed("4.0.0b36")
    assert len(backend.loading_steps(CUDA)) == before
    monkeypatch.delitem(sys.modules, "flash_attn.cute")
    *_, last = backend.loading_steps(CUDA)
    assert len(backend.loading_steps(CUDA)) == before + 1
    last()  # nothing is there to import: the first call says so


def test_an_import_that_fails_is_left_to_the_first_call(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: a library cannot be opened")

    installed("4.0.0b36")
    monkeypatch.setattr(importlib, "import_module", fail)
    steps = flash_attention.loading_steps(CUDA)
    assert len(steps) == 3
    for step in steps:
        step()


def test_attention_is_computed_by_the_library(library: FlashAttentionStandIn) -> None:
    q, k, v = tensors()
    assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
    ((rows, _, _),) = library.calls
    assert rows.data_ptr() == q.data_ptr()  # nothing is copied


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: t.expand(2, -1, -1, -1), id="one picture's for all"),
        pytest.param(lambda t: t.transpose(2, 3).contiguous().transpose(2, 3), id="other order"),
        pytest.param(
            lambda t: torch.cat([t, t[..., :4]], dim=-1)[..., :64], id="rows of other bytes"
        ),
        pytest.param(lambda t: torch.cat([t, t], dim=-1)[..., 4:68], id="an odd address"),
    ],
)
def test_what_the_gpu_cannot_read_in_blocks_is_copied(
    library: FlashAttentionStandIn, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    q, k, v = (change(tensor[:1]) for tensor in tensors())
    assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
    for rows in library.calls[0]:
        assert rows.stride(-1) == 1
        assert 0 not in rows.stride()
        assert not any(number * 2 % 16 for number in rows.stride()[:-1])
        assert rows.data_ptr() % 16 == 0


def test_a_stored_kernel_is_not_compiled_again(
    library: FlashAttentionStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = flash_attention.with_stored(b"graph", [HALF], CPU)
    assert library.compiled == [("torch.float16", 64)]
    flash_attention.with_stored(b"another", [HALF], CPU)
    flash_attention.attend(*tensors(), 0.2)
    assert library.compiled == [("torch.float16", 64)]

    start_process(monkeypatch)
    library.compile_cache.cache.clear()
    artefact, stored = flash_attention.without_stored(payload)
    assert artefact == b"graph"
    flash_attention.use_stored(stored)
    flash_attention.use_stored(stored)
    assert library.loaded == ["attention ('torch.float16', 64)"]
    assert library.compile_cache.cache == {("torch.float16", 64): "loaded"}
    flash_attention.attend(*tensors(), 0.2)
    assert len(library.compiled) == 1


def test_a_kernel_in_use_stays(library: FlashAttentionStandIn) -> None:
    _, stored = flash_attention.without_stored(flash_attention.with_stored(b"", [HALF], CPU))
    before = dict(library.compile_cache.cache)
    flash_attention.use_stored(stored)
    assert library.compile_cache.cache == before
    assert library.loaded == []


def test_bytes_without_kernels_are_left_alone() -> None:
    assert flash_attention.without_stored(b"graph") == (b"graph", None)


def test_a_library_that_cannot_be_imported_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)  # an ImportError
    q, k, v = tensors()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
        artefact, stored = flash_attention.without_stored(
            flash_attention.with_stored(b"graph", [HALF], CPU)
        )
        flash_attention.use_stored({HALF: flash_attention.StoredKernel(b"", b"")})
    assert (artefact, stored) == (b"graph", {})
    assert [r.message for r in caplog.records] == [
        "FlashAttention cannot be imported; PyTorch's attention is used"
    ]


def test_a_library_that_fails_is_left_alone(
    library: FlashAttentionStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    library.failure = AssertionError("no such kernel")
    q, k, v = tensors()
    with caplog.at_level(logging.WARNING):
        assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
        library.failure = None
        assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
    assert library.calls == []
    assert [r.message for r in caplog.records] == [
        "FlashAttention failed; PyTorch's attention is used"
    ]


def test_memory_that_is_short_is_no_failure(library: FlashAttentionStandIn) -> None:
    library.failure = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        flash_attention.attend(*tensors(), 0.2)
    library.failure = None
    flash_attention.attend(*tensors(), 0.2)
    assert len(library.calls) == 1


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(flash_attention.StoredKernel(b"no pickle", b""), id="no key"),
        pytest.param(
            flash_attention.StoredKernel(pickle.dumps(("torch.float16", 64)), b""), id="no code"
        ),
    ],
)
def test_a_stored_kernel_that_cannot_be_used_is_compiled(
    library: FlashAttentionStandIn, stored: Any
) -> None:
    flash_attention.use_stored({HALF: stored})
    q, k, v = tensors()
    assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
    assert library.compiled == [("torch.float16", 64)]


class Block(nn.Module):
    """Attention as a block has it."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mixed = scaled_dot_product_attention(q, k, v, **self.given)
        return mixed.transpose(1, 2).flatten(2) * 2


def rewritten(block: Block, *arguments: torch.Tensor) -> torch.fx.GraphModule:
    """A block's graph for any number of tokens, with its attention rewritten."""
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(block, arguments, dynamic_shapes=({2: tokens},) * 3)
    graph = program.graph_module
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten.scaled_dot_product_attention.default:
            rewrite_attention(node)
    graph.recompile()
    return graph


def test_self_attention_becomes_one_operator(
    library: FlashAttentionStandIn, installed: Callable[..., None]
) -> None:
    installed("4.0.0b36")
    graph = rewritten(Block(scale=0.2), *tensors())
    assert kernels_of(graph) == {HALF}
    q, k, v = tensors(tokens=56)
    (found,) = graph(q, k, v)
    assert len(library.calls) == 1
    assert_attention((found / 2).unflatten(2, (3, 64)).transpose(1, 2), q, k, v)


def test_the_scale_is_that_of_the_width(
    library: FlashAttentionStandIn, installed: Callable[..., None]
) -> None:
    installed("4.0.0b36")
    q, k, v = tensors()
    (found,) = rewritten(Block(), q, k, v)(q, k, v)
    torch.testing.assert_close(found, Block()(q, k, v), atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize(
    ("given", "change"),
    [
        pytest.param({"is_causal": True}, None, id="causal"),
        pytest.param({"scale": -1.0}, None, id="a scale below zero"),
        pytest.param({}, torch.Tensor.float, id="float32"),
        pytest.param({}, lambda t: t[..., :60], id="a width of no kernel"),
    ],
)
def test_other_attention_stays(
    installed: Callable[..., None],
    given: dict[str, Any],
    change: Callable[[torch.Tensor], torch.Tensor] | None,
) -> None:
    installed("4.0.0b36")
    q, k, v = (tensor if change is None else change(tensor) for tensor in tensors())
    assert kernels_of(rewritten(Block(**given), q, k, v)) == set()


def test_without_the_library_attention_stays(installed: Callable[..., None]) -> None:
    installed(None)
    assert kernels_of(rewritten(Block(), *tensors())) == set()


def test_the_operator_is_what_it_says(library: FlashAttentionStandIn) -> None:
    torch.library.opcheck(
        torch.ops.onediff.flash_attention.default,
        (*tensors(), 0.2),
        test_utils=("test_schema", "test_faketensor"),
    )


LOAD = """
import sys, torch
from unittest import mock
from onediff_ext.backends.inductor import backend, flash_attention

assert "onediff_ext.backends.inductor.kernels.flash_attention" not in sys.modules  # torch 2.4
payload = flash_attention.with_stored(b"graph", [], torch.device("cuda"))
with mock.patch.object(backend, "load_artefact", lambda artefact, index: artefact):
    assert backend.InductorBackend().load(payload, torch.device("cuda")) == b"graph"
assert torch.ops.onediff.flash_attention.default
"""


def test_a_graph_with_its_kernels_brings_the_operator() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
