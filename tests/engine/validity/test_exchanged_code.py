"""Known code in the place of other known code."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import fx, nn

from onediff_ext.engine.patches import Patches
from onediff_ext.engine.validity.python_code import PythonCode
from onediff_ext.hosts.forge_memory import MemoryFunctions, StreamedLayers
from onediff_ext.hosts.pinned_moves import PinnedMoves


class Asking(nn.Module):
    """Asks for the reason while torch's tracer runs its forward."""

    def __init__(self, code: PythonCode) -> None:
        super().__init__()
        self.layer, self.code = nn.SiLU(), code
        self.replaced = False
        self.reasons: list[str | None] = []

    def forward(self, x: Any) -> Any:
        self.replaced = nn.Module.__call__ is not self.own_call
        self.code.current_generation()
        self.reasons += [self.code.helper_reason(nn.SiLU), self.code.torch_reason()]
        return self.layer(x)

    own_call = nn.Module.__call__


def test_torchs_tracer_is_no_other_code() -> None:
    """It puts a wrapper in the place of `Module.__call__` for as long as it traces."""
    code = PythonCode()
    code.watch([nn.SiLU])
    asking = Asking(code)
    fx.symbolic_trace(asking)
    assert asking.replaced
    assert asking.reasons == [None, None]


def test_classes_that_are_seen_first_while_torch_traces() -> None:
    code = PythonCode()
    asking = Asking(code)
    asking.reasons.append("watched later")
    asking.register_forward_pre_hook(lambda *_: code.watch([nn.SiLU]))
    fx.symbolic_trace(nn.Sequential(asking))
    assert asking.replaced
    assert asking.reasons == ["watched later", None, None]
    code.current_generation()
    assert code.helper_reason(nn.SiLU) is None


def test_a_property_of_tensors(monkeypatch: Any) -> None:
    code = PythonCode()
    monkeypatch.setattr(torch.Tensor, "for_people", property(lambda self: str(self)), raising=False)
    code.current_generation()
    assert code.torch_reason() is None  # an extension's own, which nothing else reads
    monkeypatch.setattr(torch.Tensor, "ndim", property(lambda _: 4))
    code.current_generation()
    reason = code.torch_reason()
    assert reason is not None
    assert reason.startswith("torch.Tensor.ndim is replaced by")


def test_a_method_and_its_return(monkeypatch: Any) -> None:
    code = PythonCode()
    code.watch([nn.SiLU])
    with monkeypatch.context() as patch:
        patch.setattr(nn.SiLU, "forward", nn.Mish.forward)
        code.current_generation()
        assert code.helper_reason(nn.SiLU) == "SiLU.forward is not what it was"
        assert code.torch_reason() is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "sigmoid", torch.tanh)
        code.current_generation()
        assert code.torch_reason() == "torch.sigmoid is not what it was"
    code.current_generation()
    assert code.helper_reason(nn.SiLU) is None
    assert code.torch_reason() is None


HOST = """
from torch import nn

import a_host.memory_management as memory_management


class Attention(nn.Module):
    def forward(self, x):
        return x if memory_management.get_free_memory(x.device) else -x
"""


@pytest.mark.parametrize("is_patched_at_first", [True, False])
def test_our_own_stand_ins_in_a_host_are_no_other_code(
    monkeypatch: pytest.MonkeyPatch, is_patched_at_first: bool
) -> None:
    """Forge's slicing attention calls `get_free_memory`. Each job replaces it."""
    names = ("a_host", "a_host.memory_management", "a_host.attention")
    package, memory, attention = (ModuleType(name) for name in names)
    for name, module in zip(names, (package, memory, attention), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    exec("def get_free_memory(device): return 1\ndef free_memory(*_): pass", vars(memory))
    vars(package)["memory_management"] = memory
    exec(HOST, vars(attention))
    cls, code = attention.Attention, PythonCode()
    if not is_patched_at_first:
        code.watch([cls])
    moves, generations = PinnedMoves(), list[int]()
    functions = MemoryFunctions(moves, StreamedLayers(moves))
    for _ in range(3):
        with Patches() as patches:
            functions.share(memory, patches, lambda *_: None, lambda: 0)
            functions.speed_up_moves(memory, patches)
            code.watch([cls])
            generations.append(code.current_generation())
            assert code.helper_reason(cls) is None
        code.current_generation()
        assert code.helper_reason(cls) is None
    assert len(set(generations)) == 1  # else each job would examine all blocks again
    # What it stands for counts.
    monkeypatch.setattr(memory, "get_free_memory", memory.free_memory)
    code.current_generation()
    reason = code.helper_reason(cls)
    assert reason == "a_host.memory_management.get_free_memory is not what it was"


FREEING = """
factor = 2
is_due = False

def free_memory():
    global is_due
    is_due = False
"""
CALLS_IT = """
from a_host import memory_management

class Attention:
    def forward(self, x):
        memory_management.free_memory()
        return x * memory_management.factor
"""


def test_a_global_that_is_only_written_is_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forge's slicing attention empties torch's cache, which notes that this was done."""
    names = ("a_host", "a_host.memory_management", "a_host.attention")
    package, memory, attention = (ModuleType(name) for name in names)
    for name, module in zip(names, (package, memory, attention), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    freeing = (
        "factor = 2\nis_due = False\ndef free_memory():\n    global is_due\n    is_due = False"
    )
    exec(freeing, vars(memory))
    vars(package)["memory_management"] = memory
    exec(CALLS_IT, vars(attention))
    code = PythonCode()
    code.watch([attention.Attention])
    first = code.current_generation()
    monkeypatch.setattr(memory, "is_due", True)
    assert code.current_generation() == first
    monkeypatch.setattr(memory, "factor", 3)
    assert code.current_generation() != first


def test_a_global_that_is_written_and_read_is_code(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_host")
    monkeypatch.setitem(sys.modules, "a_host", module)
    source = """
sign = 1
class Block:
    def forward(self, x):
        global sign
        x, sign = sign * x, 1
        return x
"""
    exec(source, vars(module))
    code = PythonCode()
    code.watch([module.Block])
    first = code.current_generation()
    monkeypatch.setattr(module, "sign", -1)
    assert code.current_generation() != first
