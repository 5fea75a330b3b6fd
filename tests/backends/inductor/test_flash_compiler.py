"""FlashAttention in a worker: which attention becomes its kernel, and how that is compiled."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onediff_ext.backends.inductor import flash_attention, flash_compiler
from onediff_ext.backends.inductor.kernels.flash_attention import flash_kernels
from tests.support.flash_attention_fixtures import (
    HALF,
    AttentionBlock,
    assert_attention,
    fail,
    load,
    rewritten,
    stored,
    tensors,
)
from tests.support.flash_attention_stand_in import FlashAttentionStandIn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="FlashAttention is for Linux")

LINKED = flash_compiler._linked


def test_the_librarys_own_kernels_stay(flash_library: FlashAttentionStandIn) -> None:
    before = flash_library.compile_cache
    before.cache["a key"] = "a kernel"
    stored()
    assert flash_library.compile_cache is before
    assert before.cache == {"a key": "a kernel"}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda lib, patch: patch.setitem(sys.modules, "flash_attn.cute", None),
                     id="no import"),
        pytest.param(lambda lib, patch: patch.setattr(lib, "attend", fail), id="it fails"),
        pytest.param(lambda lib, patch: patch.setattr(lib, "order", (0, 1, 2)), id="no output"),
        pytest.param(lambda lib, patch: patch.setattr(lib, "key_entries", lambda q: q.shape[:1]),
                     id="a kernel for each size"),
        pytest.param(lambda lib, patch: patch.setattr(lib, "constants", lambda q: (q.shape[1],)),
                     id="an argument for each size"),
        pytest.param(lambda lib, patch: patch.setattr(lib, "constants", lambda q: (Path("a"),)),
                     id="an argument of a class"),
        pytest.param(lambda lib, patch: patch.setattr(flash_compiler, "_linked", fail),
                     id="no room to link"),
    ],
)  # fmt: skip
def test_graphs_do_without_what_cannot_be_compiled(
    flash_library: FlashAttentionStandIn,
    install_flash: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[FlashAttentionStandIn, pytest.MonkeyPatch], None],
) -> None:
    install_flash("4.0.0b36")
    fault(flash_library, monkeypatch)
    flash_library.install(monkeypatch, keep=True)
    with caplog.at_level(logging.WARNING):
        graph = rewritten(AttentionBlock(), *tensors())
    assert flash_kernels(graph) == {}
    assert not any("onediff" in str(node.target) for node in graph.graph.nodes)
    assert [r.message for r in caplog.records] == [f"FlashAttention cannot be used for {HALF}"]


@pytest.mark.parametrize("compiler", [None, "false"])
def test_without_a_linker_the_compiler_loads_the_object_file(
    flash_library: FlashAttentionStandIn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiler: str | None,
) -> None:
    found = compiler and shutil.which(compiler)
    monkeypatch.setattr(flash_compiler, "_linked", LINKED)
    monkeypatch.setattr(shutil, "which", lambda name: found)
    with caplog.at_level(logging.WARNING):
        load()
    assert flash_library.loaded_objects == ["attention ('torch.float16', 64)"]
    assert flash_library.loaded == flash_library.opened == []
    q, k, v = tensors()
    assert_attention(flash_attention.attend(q, k, v, 0.2), q, k, v)
    assert len(flash_library.calls) == 1
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith("A kernel of FlashAttention is not linked")


def linked(source: str, folder: Path) -> Path:
    """A library of C source, linked as kernels are."""
    made, library = folder / "kernel.o", folder / "kernel.so"
    command = ["g++", "-x", "c", "-fPIC", "-c", "-", "-o", str(made)]
    subprocess.run(command, input=source, text=True, check=True)
    code = flash_compiler._linked(made.read_bytes())
    assert code is not None
    library.write_bytes(code)
    return library


def test_an_object_file_is_linked(tmp_path: Path) -> None:
    library = linked("int answer(void) { return 42; }", tmp_path)
    assert ctypes.CDLL(str(library)).answer() == 42
    # Another machine's C library may be older.
    assert b"libc.so" not in library.read_bytes()
    assert b"__cxa_finalize" not in library.read_bytes()


def test_a_missing_symbol_fails_the_load_and_not_the_call(tmp_path: Path) -> None:
    library = linked("int missing(void); int answer(void) { return missing(); }", tmp_path)
    open_library = ctypes.CDLL(None).dlopen
    open_library.restype = ctypes.c_void_p
    assert open_library(str(library).encode(), os.RTLD_LAZY | os.RTLD_LOCAL) is None


def test_self_attention_becomes_one_operator(
    flash_library: FlashAttentionStandIn, install_flash: Callable[..., None]
) -> None:
    install_flash("4.0.0b36")
    graph = rewritten(AttentionBlock(scale=0.2), *tensors())
    load()
    assert set(flash_kernels(graph)) == {HALF}
    q, k, v = tensors(tokens=56)
    (found,) = graph(q, k, v)
    assert len(flash_library.calls) == 1
    assert_attention((found / 2).unflatten(2, (3, 64)).transpose(1, 2), q, k, v)


def test_the_scale_is_that_of_the_width(
    flash_library: FlashAttentionStandIn, install_flash: Callable[..., None]
) -> None:
    install_flash("4.0.0b36")
    q, k, v = tensors()
    graph = rewritten(AttentionBlock(), q, k, v)
    load()
    (found,) = graph(q, k, v)
    assert len(flash_library.calls) == 1
    torch.testing.assert_close(found, AttentionBlock()(q, k, v), atol=2e-3, rtol=1e-2)


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
    install_flash: Callable[..., None],
    given: dict[str, Any],
    change: Callable[[torch.Tensor], torch.Tensor] | None,
) -> None:
    install_flash("4.0.0b36")
    q, k, v = (tensor if change is None else change(tensor) for tensor in tensors())
    assert flash_kernels(rewritten(AttentionBlock(**given), q, k, v)) == {}


def test_without_the_library_attention_stays(install_flash: Callable[..., None]) -> None:
    install_flash(None)
    assert flash_kernels(rewritten(AttentionBlock(), *tensors())) == {}
