"""The operator table covers all operators of blocks; needs no OneFlow."""

from __future__ import annotations

import pytest
import torch

from onediff_ext.backends.oneflow.backend import OneFlowBackend
from onediff_ext.backends.oneflow.operator_table import TABLE
from onediff_ext.backends.oneflow.program import FlowProgram
from onediff_ext.core.errors import BackendError
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.export.exporter import export_block, load_program
from onediff_ext.hosts.diffusers.blocks import AttentionFamily
from tests.oneflow.operators import NO_RESULT, REFUSED, SAME_RESULT
from tests.support.contract_blocks import BLOCKS

CPU = torch.device("cpu")


def test_every_entry_is_an_operator_and_has_a_case():
    for name in TABLE:
        operator, overload = name.removeprefix("aten.").split(".")
        assert overload in getattr(torch.ops.aten, operator).overloads(), name
    assert set(TABLE) == {*SAME_RESULT, *NO_RESULT}
    assert set(REFUSED) <= set(TABLE)


def _vae_attention():
    from diffusers.models.attention_processor import Attention

    return Attention(
        32, heads=1, dim_head=32, norm_num_groups=8, residual_connection=True, bias=True,
        _from_deprecated_attn_block=True, rescale_output_factor=1,
    ).eval().requires_grad_(False)  # fmt: skip


CASES = {
    **{name: BLOCKS[name] for name in ("resnet", "transformer")},  # with one output
    "vae-attention": (
        AttentionFamily(),
        _vae_attention,
        lambda b, h, w: (torch.randn(b, 32, h, w),),
    ),
}


@pytest.mark.parametrize("autocast", [None, ("cpu", torch.bfloat16)], ids=["plain", "autocast"])
@pytest.mark.parametrize("kind", CASES)
def test_blocks_are_covered(kind, autocast):
    family, make_block, make_inputs = CASES[kind]
    block = make_block()
    tree = BlockTree(block, ("diffusers.",))
    call = family.graph_call(block, family.bind(block, make_inputs(2, 8, 8), {}))
    program = export_block(tree.copy(), family, tree.names, tree.weights(), call, CPU, autocast)
    stored = load_program(OneFlowBackend().build(program, CPU))
    FlowProgram(stored.graph_module)
    # The stored program is still the block: torch computes the same result from it.
    with torch.no_grad():
        smaller = family.graph_call(block, family.bind(block, make_inputs(1, 3, 5), {}))
        arguments = [*tree.weights(), *smaller.tensors]
        expected = program.graph_module(*arguments)[0]
        assert torch.equal(stored.graph_module(*arguments)[0], expected)


def test_an_unknown_operator_is_named_before_oneflow_is_touched(run_apart):
    code = """
import sys, torch
from onediff_ext.backends.oneflow.backend import OneFlowBackend
from onediff_ext.core.errors import BackendError

class Sorts(torch.nn.Module):
    def forward(self, x):
        return torch.cumsum(torch.sort(x)[0], 0)

program = torch.export.export(Sorts(), (torch.randn(4),))
try:
    OneFlowBackend().build(program, torch.device("cpu"))
except BackendError as exc:
    print(exc.message)
assert not any(name.split(".")[0] == "oneflow" for name in sys.modules)
"""
    assert run_apart(code) == "OneFlow has no operator for aten.cumsum.default, aten.sort.default\n"


def test_a_program_with_something_else_than_calls_is_refused():
    class Holds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.weight

    with pytest.raises(BackendError, match="get_attr weight"):
        FlowProgram(torch.fx.symbolic_trace(Holds()))
