"""Replaced code is noticed, and named after the module that defines it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.engine.validity.foreign_code import (
    defining_module,
    patched_class_reason,
    replaced_methods,
)
from onediff_ext.engine.validity.python_code import PythonCode


def test_replaced_code_is_another_generation_until_it_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = PythonCode()
    code.watch([nn.Conv2d])
    first = code.current_generation()
    with monkeypatch.context() as patch:
        patch.setattr(nn.Conv2d, "_conv_forward", lambda *args: None)
        second = code.current_generation()
        assert second != first
        assert "Conv2d is patched by" in str(patched_class_reason(nn.Conv2d))
        assert code.current_generation(1) == second
    assert code.current_generation(1) == second  # one moment: nothing is replaced within it
    assert code.current_generation(2) == first  # as it was
    assert patched_class_reason(nn.Conv2d) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", functools.wraps(torch.cat)(lambda *args: None))
        assert code.current_generation() != first
        assert code.torch_reason() == f"torch.cat is replaced by {__name__}"
    assert code.current_generation() == first
    assert code.torch_reason() is None


def test_what_python_keeps_on_a_class_is_no_other_code() -> None:
    """The first copy of a processor made all blocks be read again: Python notes its slots then."""

    class Processor:
        pass

    code = PythonCode()
    code.watch([Processor])
    first = code.current_generation()
    copy.deepcopy(Processor())
    assert Processor.__annotations__ == {}
    assert "__slotnames__" in vars(Processor)
    assert code.current_generation() == first
    Processor.__call__ = lambda self, x: x
    assert code.current_generation() != first


@pytest.mark.parametrize("decorate", [torch.no_grad(), torch.inference_mode()])
def test_a_decorator_of_torch_hides_no_foreign_code(
    decorate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patch under torch.no_grad() counted as torch's own, and graphs went on without it."""

    def forward(self: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    decorated = decorate(forward)
    assert defining_module(decorated) == __name__
    assert defining_module(decorate(nn.Conv2d.forward)) == "torch.nn.modules.conv"
    assert patched_class_reason(nn.Conv2d) is None
    monkeypatch.setattr(nn.Conv2d, "forward", decorated)
    assert f"patched by {__name__} (forward)" in str(patched_class_reason(nn.Conv2d))


def test_functools_wraps_does_not_hide_the_defining_module() -> None:
    @functools.wraps(nn.Linear.forward)
    def wrapper(*args: Any) -> Any:
        return nn.Linear.forward(*args)

    assert wrapper.__module__ == "torch.nn.modules.linear"
    assert defining_module(wrapper) == __name__
    layer = nn.Linear(2, 2)
    layer.forward = wrapper
    layer.to = wrapper  # no forward calls it
    assert list(replaced_methods(layer)) == ["forward"]
