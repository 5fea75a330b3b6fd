"""Exported programs, whatever the backend."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.family import BlockCall
from onediff_ext.engine.export.exporter import export_block, input_fakes, save_program
from tests.support.contract_blocks import BLOCKS, CPU


def exported(name: str) -> tuple[BlockCall, torch.export.ExportedProgram]:
    family, make_block, make_inputs = BLOCKS[name]
    block = make_block()
    tree = BlockTree(block, ("diffusers.",))
    call = family.graph_call(block, family.bind(block, make_inputs(2, 8, 8), {}))
    traced = tree.copy()
    family.prepare(traced)
    return call, export_block(traced, family, tree.names, tree.weights(), call, CPU)


@pytest.mark.parametrize("name", BLOCKS)
def test_dims_of_one_name_are_one_symbol(name: str) -> None:
    """Attention does not require as many values as keys; with fewer it reads what is not there."""
    call, program = exported(name)
    symbols: dict[str, set[object]] = {}
    for fake, dims in zip(input_fakes(program)[-len(call.tensors) :], call.dims, strict=True):
        for size, dim in zip(fake.shape, dims, strict=True):
            if dim is not None:
                assert isinstance(size, torch.SymInt)
                symbols.setdefault(dim, set()).add(size.node.expr)
    assert {dim: len(found) for dim, found in symbols.items()} == dict.fromkeys(symbols, 1)
    assert len(set().union(*symbols.values())) == len(symbols)


def test_torch_keeps_no_operators_results() -> None:
    """It would find next to none of them again: sizes are symbols."""
    FakeTensorMode.cache_clear()
    exported("resnet")
    assert FakeTensorMode.cache_info().size == 0


def test_programs_name_no_path_of_this_machine() -> None:
    """Archives of graphs hold them."""
    _, program = exported("resnet")
    assert not getattr(torch.fx.config, "do_not_emit_stack_traces", False)  # for others' exports
    assert getattr(torch._dynamo.config, "fake_tensor_cache_enabled", True)
    saved = zipfile.ZipFile(io.BytesIO(save_program(program)))
    content = b"".join(map(saved.read, saved.namelist()))
    assert b"conv2d" in content
    for folder in (Path(torch.__file__).parent, Path(__file__).parents[3]):
        assert str(folder).encode() not in content
