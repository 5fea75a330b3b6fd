"""The contract of all backends: one suite for each of them."""

from __future__ import annotations

import functools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from onediff_ext.backends.registry import make_backend
from onediff_ext.core.errors import BackendError, OptionError
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.checking.compare_with_eager import compare_all
from onediff_ext.engine.export.exporter import export_block, load_program, save_program
from tests.support.contract_blocks import BLOCKS, CPU

BACKENDS = ("eager", "inductor", "oneflow")


@pytest.fixture(scope="session", params=[(b, k) for b in BACKENDS for k in BLOCKS], ids="-".join)
def built(request):
    """Backend, family, block, inputs and the graph's bytes, each built once."""
    return _build(*request.param)


@functools.cache
def _build(name, kind):
    backend = _available(name)
    family, make_block, make_inputs = BLOCKS[kind]
    block = make_block()
    tree = BlockTree(block, ("diffusers.",))
    call = family.graph_call(block, family.bind(block, make_inputs(2, 8, 8), {}))
    traced = tree.copy()
    family.prepare(traced)
    program = export_block(traced, family, tree.names, tree.weights(), call, CPU)
    if name == "oneflow" and kind == "two streams":
        with pytest.raises(BackendError, match="one output"):
            backend.build(program, CPU)
        pytest.skip("OneFlow's graphs have one output")
    payload = backend.build(load_program(save_program(program)), CPU)
    return backend, family, block, make_inputs, payload


def _available(name):
    backend = make_backend(name)
    reason = backend.unavailable_reason(CPU)
    if reason is not None:
        assert name not in ("eager", "inductor"), reason
        pytest.skip(reason)
    return backend


def _run(graph, family, block, inputs):
    with torch.no_grad():
        call = family.graph_call(block, family.bind(block, inputs, {}))
        return graph([*BlockTree(block, ("diffusers.",)).weights(), *call.tensors])


def _compare(found, family, block, inputs):
    return compare_all(found, family.tensors_of(block(*inputs)))


@pytest.mark.parametrize(
    ("batch", "height", "width"), [(1, 8, 8), (1, 1, 1), (2, 45, 3), (3, 3, 3), (5, 17, 25)]
)
def test_serves_every_size(built, batch, height, width):
    backend, family, block, make_inputs, payload = built
    inputs = make_inputs(batch, height, width)
    found = _run(backend.load(payload, CPU), family, block, inputs)
    with torch.no_grad():
        comparison = _compare(found, family, block, inputs)
    assert comparison.problem is None
    assert comparison.error < 1e-5


def test_weights_are_arguments_and_stay_as_they_are(built):
    backend, family, block, make_inputs, payload = built
    graph, inputs = backend.load(payload, CPU), make_inputs(2, 4, 6)
    before = _run(graph, family, block, inputs)
    originals = [p.detach().clone() for p in block.parameters()]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(0.5)
        changed = _run(graph, family, block, inputs)
        assert _compare(changed, family, block, inputs).problem is None
        assert compare_all(changed, before).problem is not None
        for parameter, original in zip(block.parameters(), originals, strict=True):
            assert torch.equal(parameter, 0.5 * original)
            parameter.copy_(original)


def test_inputs_are_not_written(built):
    backend, family, block, make_inputs, payload = built
    inputs = make_inputs(2, 4, 6)
    given = [t for t in tree_leaves(inputs) if t is not None]
    copies = [t.clone() for t in given]
    _run(backend.load(payload, CPU), family, block, inputs)
    assert all(map(torch.equal, given, copies))


def test_one_result_does_not_live_in_anothers_memory(built):
    backend, family, block, make_inputs, payload = built
    graph, inputs = backend.load(payload, CPU), make_inputs(2, 4, 6)
    first = _run(graph, family, block, inputs)
    kept = [output.clone() for output in first]
    _run(graph, family, block, make_inputs(2, 4, 6))
    assert all(map(torch.equal, first, kept))


def test_a_graph_has_no_debug_information(built):
    *_, payload = built
    assert b".debug_line" not in payload


def test_threads_do_not_mix(built):
    backend, family, block, make_inputs, payload = built
    graph = backend.load(payload, CPU)
    inputs = [make_inputs(1 + i % 3, 3 + i % 5, 4) for i in range(24)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: _run(graph, family, block, i), inputs))
    with torch.no_grad():
        for output, i in zip(found, inputs, strict=True):
            assert _compare(output, family, block, i).problem is None


def test_bytes_of_something_else_are_refused(built):
    backend, *_ = built
    with pytest.raises(BackendError):
        backend.load(b"not a graph", CPU)


@pytest.mark.parametrize("name", BACKENDS)
def test_loads_in_a_new_process_without_compiling(name, tmp_path: Path):
    kinds = [kind for kind in BLOCKS if (name, kind) != ("oneflow", "two streams")]
    for kind in kinds:
        *_, payload = _build(name, kind)
        (tmp_path / kind).write_bytes(payload)
    code = (
        "import sys, torch, pathlib\n"
        "from onediff_ext.backends.registry import make_backend\n"
        f"backend, folder = make_backend({name!r}), pathlib.Path({str(tmp_path)!r})\n"
        f"for kind in {kinds!r}:\n"
        "    backend.load((folder / kind).read_bytes(), torch.device('cpu'))\n"
        "    assert 'torch._inductor.compile_fx' not in sys.modules, kind\n"
    )
    # No compiler within reach: compiling would fail, not just be slow.
    environment = {"PATH": str(tmp_path), "CXX": "/nonexistent", "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
    left = [p for p in tmp_path.iterdir() if p.name.startswith("onediff-")]
    assert left == []


@pytest.mark.parametrize("name", BACKENDS)
def test_key_entries_are_plain_text_and_stable(name):
    backend = _available(name)
    entries = backend.key_entries(CPU)
    assert entries == make_backend(name).key_entries(CPU)
    assert entries["backend"] == name
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in entries.items())
    assert backend.unavailable_reason(CPU) is None


def test_an_unknown_backend_is_named():
    with pytest.raises(OptionError, match="no backend 'tensorrt'"):
        make_backend("tensorrt")
