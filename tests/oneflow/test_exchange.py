"""Tensors cross in shared memory, and the caller's are never written."""

from __future__ import annotations

import pytest
import torch

from onediff_ext.backends.oneflow import tensor_exchange
from onediff_ext.backends.oneflow.program import FlowProgram
from onediff_ext.backends.oneflow.static_graphs import Plans


class Mixes(torch.nn.Module):
    def forward(self, weight, x):
        return (torch.nn.functional.conv2d(x, weight, padding=1) * 0.5 + x,)


@pytest.fixture(scope="module")
def program() -> FlowProgram:
    example = torch.randn(6, 6, 3, 3), torch.randn(2, 6, 8, 9)
    return FlowProgram(torch.export.export(Mixes(), example).run_decompositions({}).graph_module)


def _layouts() -> dict[str, torch.Tensor]:
    x = torch.randn(2, 6, 8, 9, generator=torch.Generator().manual_seed(0))
    return {
        "contiguous": x,
        "channels last": x.contiguous(memory_format=torch.channels_last),
        "strided": torch.randn(2, 6, 8, 18)[..., ::2],
        "transposed": torch.randn(2, 6, 9, 8).transpose(2, 3),
        "expanded": x[:1].expand(2, -1, -1, -1),
        "offset": torch.randn(3, 6, 8, 9)[1:],
    }


@pytest.mark.parametrize("layout", _layouts())
def test_memory_is_shared_where_it_can_be(flow, layout):
    tensor = _layouts()[layout]
    crossed = tensor_exchange.to_flow(flow, tensor)
    back = tensor_exchange.to_torch(flow, crossed)
    if tensor_exchange.is_permuted(tensor):
        back = back.permute(0, 3, 1, 2)
    assert torch.equal(back, tensor)
    is_shared = back.data_ptr() == tensor.data_ptr()
    assert is_shared == (layout in ("contiguous", "channels last", "offset"))


@pytest.mark.parametrize("of_weight", _layouts())
@pytest.mark.parametrize("of_input", _layouts())
def test_the_callers_tensors_are_not_written(flow, program, of_input, of_weight):
    x = _layouts()[of_input]
    weight = _layouts()[of_weight][:, :, :6, :6].reshape(-1)[: 6 * 6 * 9]
    weight = weight.reshape(6, 6, 3, 3).to(memory_format=torch.channels_last)
    kept = [weight.clone(), x.clone()]
    strides = weight.stride(), x.stride()
    plans = Plans(flow)
    for _ in range(2):
        found = plans.run(program, [weight, x])
        torch.testing.assert_close(found, Mixes()(weight, x)[0], rtol=1e-5, atol=1e-5)
    assert (weight.stride(), x.stride()) == strides
    assert torch.equal(weight, kept[0])
    assert torch.equal(x, kept[1])


def test_a_result_is_there_before_the_input_may_be_overwritten(flow, program):
    plans, weight, x = Plans(flow), torch.randn(6, 6, 3, 3), torch.empty(2, 6, 32, 32)
    for _ in range(50):
        x.normal_()
        expected = Mixes()(weight, x)[0]
        found = plans.run(program, [weight, x])
        x.fill_(float("nan"))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(plans) == 1
