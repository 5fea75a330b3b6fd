"""FlashAttention where graphs run: when it is used, how a stored kernel is loaded, and when not."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onediff_ext.backends.inductor import flash_attention
from onediff_ext.backends.inductor.backend import InductorBackend
from onediff_ext.core.errors import BackendError
from onediff_ext.engine import machine
from tests.support.flash_attention_fixtures import (
    CPU,
    CUDA,
    HALF,
    assert_attention,
    fail,
    load,
    start_process,
    stored,
    tensors,
)
from tests.support.flash_attention_stand_in import FlashAttentionStandIn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="FlashAttention is for Linux")


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
    install_flash: Callable[..., None],
    version: str | None,
    capability: tuple[int, int],
    is_used: bool,
) -> None:
    install_flash(version, capability)
    assert flash_attention.version(CUDA) == (version if is_used else None)


def test_no_other_system_has_it(
    install_flash: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_flash("4.0.0b36")
    monkeypatch.setattr(sys, "platform", "win32")
    assert flash_attention.version(CUDA) is None


def test_graphs_with_and_without_it_are_different_graphs(
    install_flash: Callable[..., None],
) -> None:
    backend = InductorBackend()
    install_flash(None)
    without = backend.key_entries(CUDA)
    install_flash("4.0.0b36")
    versions = "flash-attn-4 4.0.0b36, nvidia-cutlass-dsl 4.7.1, apache-tvm-ffi 4.7.1"
    with_it = f"{versions}, cpu {machine.cpu_flags_digest()}"
    assert backend.key_entries(CUDA) == {**without, "attention": with_it}
    assert "attention" not in backend.key_entries(CPU)


def test_another_compiler_is_another_graph(install_flash: Callable[..., None]) -> None:
    backend = InductorBackend()
    install_flash("4.0.0b36")
    first = backend.key_entries(CUDA)
    install_flash("4.0.0b36", compilers="4.8.0")
    assert backend.key_entries(CUDA) != first


def test_a_cpu_with_other_instructions_is_another_graph(
    install_flash: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = InductorBackend()
    install_flash("4.0.0b36")
    first = backend.key_entries(CUDA)
    monkeypatch.setattr(flash_attention, "cpu_flags_digest", lambda: "0123abcd")
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
    flash_library: FlashAttentionStandIn, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    load()
    q, k, v = (change(tensor[:1]) for tensor in tensors())
    assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
    for rows in flash_library.calls[0]:
        assert rows.stride(-1) == 1
        assert 0 not in rows.stride()
        assert not any(number * 2 % 16 for number in rows.stride()[:-1])
        assert rows.data_ptr() % 16 == 0


def test_attention_is_computed_by_the_kernel(flash_library: FlashAttentionStandIn) -> None:
    load()
    q, k, v = tensors()
    assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
    ((rows, _, _),) = flash_library.calls
    assert rows.data_ptr() == q.data_ptr()  # nothing is copied
    assert flash_library.opened == [str(flash_library.runtime)]


def test_a_process_that_draws_imports_no_compiler(
    flash_library: FlashAttentionStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = flash_attention.with_stored(b"graph", {HALF: stored()})
    assert stored() is stored()  # compiled once
    assert flash_library.compiled == [("torch.float16", 64)]

    start_process(monkeypatch)
    for name in ("flash_attn.cute", "flash_attn.cute.interface", "cutlass.cute.runtime"):
        monkeypatch.setitem(sys.modules, name, None)  # an ImportError
    artefact, kernels = flash_attention.without_stored(payload)
    assert artefact == b"graph"
    assert kernels is not None
    flash_attention.use_stored(kernels)
    flash_attention.use_stored(kernels)
    assert flash_library.loaded == ["attention ('torch.float16', 64)"]
    q, k, v = tensors()
    assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
    assert len(flash_library.calls) == 1


def test_bytes_without_kernels_are_left_alone() -> None:
    assert flash_attention.without_stored(b"graph") == (b"graph", None)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_kernel_that_cannot_be_loaded_is_done_without(
    flash_library: FlashAttentionStandIn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_there: bool,
) -> None:
    kernels = {HALF: stored()}
    if is_there:
        monkeypatch.setattr(flash_library, "load_module", fail)
        flash_library.install(monkeypatch)
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


def test_a_loaded_kernel_leaves_no_file(
    flash_library: FlashAttentionStandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    load()
    assert [place.parts[1] for place in flash_library.places] == ["proc"]  # in memory
    assert list(temporary.iterdir()) == []


def test_a_kernel_that_fails_is_left_alone(
    flash_library: FlashAttentionStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    load()
    flash_library.failure = RuntimeError("no such device")
    q, k, v = tensors()
    with caplog.at_level(logging.WARNING):
        assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
        flash_library.failure = None
        assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
    assert flash_library.calls == []
    assert [r.message for r in caplog.records] == [
        "FlashAttention failed; PyTorch's attention is used instead"
    ]


def test_memory_that_is_short_is_no_failure(flash_library: FlashAttentionStandIn) -> None:
    load()
    flash_library.failure = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        flash_attention.attend(*tensors(), 0.2)
    flash_library.failure = None
    flash_attention.attend(*tensors(), 0.2)
    assert len(flash_library.calls) == 1


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9])
def test_a_damaged_graph_is_an_error_of_the_backend(
    flash_library: FlashAttentionStandIn, kept: float
) -> None:
    payload = flash_attention.with_stored(b"", {HALF: stored()})
    with pytest.raises(BackendError):
        InductorBackend().load(payload[: int(len(payload) * kept)], CUDA)


def test_the_operator_is_what_it_says(flash_library: FlashAttentionStandIn) -> None:
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
