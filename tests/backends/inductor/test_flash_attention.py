"""FlashAttention in graphs: when it is used, what is stored of it, and what happens without it."""

from __future__ import annotations

import ctypes
import logging
import subprocess
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
from onediff_ext.backends.inductor.backend import InductorBackend
from onediff_ext.backends.inductor.flash_attention import Kernel, StoredKernel
from onediff_ext.backends.inductor.kernels.flash_attention import flash_kernels
from onediff_ext.backends.inductor.kernels.rewrite_attention import rewrite_attention
from tests.support.flash_attention_stand_in import FlashAttentionStandIn

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
HALF = Kernel(torch.float16, 64)


@pytest.fixture(autouse=True)
def _another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    start_process(monkeypatch)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FlashAttentionStandIn:
    stand_in = FlashAttentionStandIn(tmp_path / "packages")
    stand_in.install(monkeypatch)
    monkeypatch.setattr(flash_compiler, "_linked", lambda object_file: object_file)
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: stand_in.opened.append(path))
    return stand_in


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
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
    load()
    q, k, v = (change(tensor[:1]) for tensor in tensors())
    assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
    for rows in library.calls[0]:
        assert rows.stride(-1) == 1
        assert 0 not in rows.stride()
        assert not any(number * 2 % 16 for number in rows.stride()[:-1])
        assert rows.data_ptr() % 16 == 0


def test_attention_is_computed_by_the_kernel(library: FlashAttentionStandIn) -> None:
    load()
    q, k, v = tensors()
    assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
    ((rows, _, _),) = library.calls
    assert rows.data_ptr() == q.data_ptr()  # nothing is copied
    assert library.opened == [str(library.runtime)]


def test_a_process_that_draws_imports_no_compiler(
    library: FlashAttentionStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = flash_attention.with_stored(b"graph", {HALF: stored()})
    assert stored() is stored()  # compiled once
    assert library.compiled == [("torch.float16", 64)]

    start_process(monkeypatch)
    for name in ("flash_attn.cute", "flash_attn.cute.interface", "cutlass.cute.runtime"):
        monkeypatch.setitem(sys.modules, name, None)  # an ImportError
    artefact, kernels = flash_attention.without_stored(payload)
    assert artefact == b"graph"
    assert kernels is not None
    flash_attention.use_stored(kernels)
    flash_attention.use_stored(kernels)
    assert library.loaded == ["attention ('torch.float16', 64)"]
    q, k, v = tensors()
    assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
    assert len(library.calls) == 1


def test_bytes_without_kernels_are_left_alone() -> None:
    assert flash_attention.without_stored(b"graph") == (b"graph", None)


def test_the_librarys_own_kernels_stay(library: FlashAttentionStandIn) -> None:
    before = library.compile_cache
    before.cache["a key"] = "a kernel"
    stored()
    assert library.compile_cache is before
    assert before.cache == {"a key": "a kernel"}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda lib, patch: patch.setitem(sys.modules, "flash_attn.cute", None),
                     id="no import"),
        pytest.param(lambda lib, patch: patch.setattr(lib, "attend", fail), id="it fails"),
        pytest.param(lambda lib, patch: patch.setattr(lib, "order", (0, 1, 2)), id="no output"),
        pytest.param(lambda lib, patch: patch.setattr(flash_compiler, "_linked", fail),
                     id="no linker"),
    ],
)  # fmt: skip
def test_graphs_do_without_what_cannot_be_compiled(
    library: FlashAttentionStandIn,
    installed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[FlashAttentionStandIn, pytest.MonkeyPatch], None],
) -> None:
    installed("4.0.0b36")
    fault(library, monkeypatch)
    library.install(monkeypatch, keep=True)
    with caplog.at_level(logging.WARNING):
        graph = rewritten(Block(), *tensors())
    assert flash_kernels(graph) == {}
    assert not any("onediff" in str(node.target) for node in graph.graph.nodes)
    assert [r.message for r in caplog.records] == [f"FlashAttention cannot be used for {HALF}"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_kernel_that_cannot_be_loaded_is_done_without(
    library: FlashAttentionStandIn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_there: bool,
) -> None:
    kernels = {HALF: stored()}
    if is_there:
        monkeypatch.setattr(library, "load_module", fail)
        library.install(monkeypatch)
    else:
        monkeypatch.setattr(flash_attention, "_COMPILER_PACKAGE", "no_such_package")
    q, k, v = tensors()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            flash_attention.use_stored(kernels)
            assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
    assert [r.message for r in caplog.records] == [
        "A kernel of FlashAttention cannot be loaded; PyTorch's attention is used"
    ]


def test_a_kernel_that_fails_is_left_alone(
    library: FlashAttentionStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    load()
    library.failure = RuntimeError("no such device")
    q, k, v = tensors()
    with caplog.at_level(logging.WARNING):
        assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
        library.failure = None
        assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
    assert library.calls == []
    assert [r.message for r in caplog.records] == [
        "FlashAttention failed; PyTorch's attention is used instead"
    ]


def test_memory_that_is_short_is_no_failure(library: FlashAttentionStandIn) -> None:
    load()
    library.failure = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        flash_attention.attend(*tensors(), 0.2)
    library.failure = None
    flash_attention.attend(*tensors(), 0.2)
    assert len(library.calls) == 1


def test_an_object_file_is_linked(tmp_path: Path) -> None:
    source, made = tmp_path / "kernel.c", tmp_path / "kernel.o"
    source.write_text("int answer(void) { return 42; }", encoding="utf-8")
    subprocess.run(["g++", "-x", "c", "-fPIC", "-c", str(source), "-o", str(made)], check=True)
    library = tmp_path / "kernel.so"
    library.write_bytes(flash_compiler._linked(made.read_bytes()))
    assert ctypes.CDLL(str(library)).answer() == 42


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
    load()
    assert set(flash_kernels(graph)) == {HALF}
    q, k, v = tensors(tokens=56)
    (found,) = graph(q, k, v)
    assert len(library.calls) == 1
    assert_attention((found / 2).unflatten(2, (3, 64)).transpose(1, 2), q, k, v)


def test_the_scale_is_that_of_the_width(
    library: FlashAttentionStandIn, installed: Callable[..., None]
) -> None:
    installed("4.0.0b36")
    q, k, v = tensors()
    graph = rewritten(Block(), q, k, v)
    load()
    (found,) = graph(q, k, v)
    assert len(library.calls) == 1
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
    assert flash_kernels(rewritten(Block(**given), q, k, v)) == {}


def test_without_the_library_attention_stays(installed: Callable[..., None]) -> None:
    installed(None)
    assert flash_kernels(rewritten(Block(), *tensors())) == {}


def test_the_operator_is_what_it_says(library: FlashAttentionStandIn) -> None:
    load()
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
payload = flash_attention.with_stored(b"graph", {})
with mock.patch.object(backend, "load_artefact", lambda artefact, index: artefact):
    assert backend.InductorBackend().load(payload, torch.device("cuda")) == b"graph"
assert torch.ops.onediff.flash_attention.default
"""


def test_a_graph_with_its_kernels_brings_the_operator() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
