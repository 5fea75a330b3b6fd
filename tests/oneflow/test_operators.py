"""Each operator of the table gives in OneFlow what it gives in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onediff_ext.backends.oneflow import tensor_exchange
from onediff_ext.backends.oneflow.operator_table import TABLE
from onediff_ext.core.errors import BackendError
from tests.oneflow.operators import NO_RESULT, REFUSED, SAME_RESULT

CALLS = [(name, i) for name, calls in SAME_RESULT.items() for i in range(len(calls))]


def _as_flow(flow: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bool:  # no DLPack for it in OneFlow 0.9
            return _as_flow(flow, value.to(torch.uint8)).to(flow.bool)
        return tensor_exchange.to_flow(flow, value)
    if isinstance(value, list):
        return [_as_flow(flow, item) for item in value]
    return value


def _as_torch(flow: Any, value: Any) -> list[Any]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [tensor_exchange.to_torch(flow, v) if isinstance(v, flow.Tensor) else v for v in values]


def _operator(name: str) -> Any:
    operator, overload = name.removeprefix("aten.").split(".")
    return getattr(getattr(torch.ops.aten, operator), overload)


@pytest.mark.parametrize(("name", "number"), CALLS, ids=lambda v: str(v))
def test_equals_torch(flow, name, number):
    args, kwargs = SAME_RESULT[name][number]()
    expected = _operator(name)(*args, **kwargs)
    expected = list(expected) if isinstance(expected, (list, tuple)) else [expected]
    found = _as_torch(flow, TABLE[name](flow, *(_as_flow(flow, a) for a in args), **kwargs))
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, torch.Tensor):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            torch.testing.assert_close(a, b.contiguous(), rtol=1e-5, atol=1e-5)
        else:
            assert a == b


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_it_cannot_express(flow, name):
    args, kwargs = REFUSED[name]()
    with pytest.raises(BackendError, match="has no OneFlow form") as info:
        TABLE[name](flow, *(_as_flow(flow, a) for a in args), **kwargs)
    assert "\n" not in info.value.message


@pytest.mark.parametrize("name", NO_RESULT)
def test_checks_do_nothing(flow, name):
    assert TABLE[name](flow, None) is None
