"""Graphs of whole models, compiled for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tools.check_targets import __main__ as check_targets
from tools.check_targets.graphs import (
    GraphTarget,
    compiled_graphs,
    kernels_in,
    operators_in,
)
from tools.check_targets.targets import Target

CODE = """
triton_poi_add_0 = async_compile.triton('triton_poi_add_0', '''
import triton
@triton.jit
def triton_poi_add_0(x): ...
''', device_str='cuda')

async_compile.wait(globals())

    def call(self, args):
        extern_kernels.mm(buf0, reinterpret_tensor(arg1), out=buf1)
        # Topologically Sorted Source Nodes: torch.ops.aten.view.default(x)
        buf2 = torch.ops.aten._scaled_dot_product_efficient_attention.default(buf1)
        triton_poi_add_0.run(buf2, stream=stream0)
"""


def test_kernels_and_operators_are_found_in_the_code() -> None:
    ((name, source),) = kernels_in(CODE)
    assert name == "triton_poi_add_0"
    assert source.strip().endswith("def triton_poi_add_0(x): ...")
    assert operators_in(CODE) == ("_scaled_dot_product_efficient_attention", "mm")


def test_what_does_not_fit_or_has_no_code_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fits = Target("triton_poi_add_0", "", 75, shared_bytes=512, registers=40, spilled_bytes=8)
    wide = Target("triton_red_sum_1", "", 75, error="70,000 bytes of shared memory; 65,536 exist")
    made = [
        GraphTarget("sd1", "ResnetBlock2D", 75, (fits,), ("convolution",)),
        GraphTarget("sd1", "BasicTransformerBlock", 75, (fits, wide), ("mm",)),
        GraphTarget("sd1", "Attention", 75, error="BackendError: no"),
    ]

    def graphs(models: object, dtype: object, wanted: object) -> Iterator[GraphTarget]:
        assert (models, dtype, wanted) == (["sd1"], torch.float16, [75])
        yield from made

    monkeypatch.setattr(check_targets, "compiled_graphs", graphs)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setattr(sys.modules["triton"], "__spec__", ModuleSpec("triton", None))
    path = tmp_path / "targets.json"
    arguments = ["--graphs", "sd1", "--capability", "75", "--json", str(path)]
    assert check_targets.main(arguments) == 1
    said = capsys.readouterr().out
    assert "NO sd1, BasicTransformerBlock, 75: 70,000 bytes of shared memory" in said
    assert "NO sd1, Attention, 75: BackendError: no" in said
    assert "PyTorch's own: convolution, mm" in said
    first, second, third = json.loads(path.read_text())["rows"]
    assert first["spilled_bytes"] == {"triton_poi_add_0": 8}
    assert (second["kernels"], second["most_shared_bytes"]) == (2, 512)
    assert third["errors"] == ["BackendError: no"]
    made[1:] = []
    assert check_targets.main(arguments) == 0


@pytest.mark.parametrize("arguments", [[], ["--graphs"]])
def test_what_the_environment_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        check_targets.main(arguments)
    said = capsys.readouterr().err
    assert ("needs torch for CUDA" if arguments else "Triton is not installed") in said
    assert "pip install" in said


@pytest.mark.skipif(torch.version.cuda is None, reason="needs torch for CUDA, and no GPU")
@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU where there is none")
def test_a_whole_model_is_compiled_for_two_generations() -> None:
    found = list(compiled_graphs(["tiny"], torch.float16, [75, 90]))
    assert {graph.capability for graph in found} == {75, 90}
    for graph in found:
        assert graph.error == ""
        assert graph.kernels
        assert [kernel for kernel in graph.kernels if kernel.error] == []
        assert all(kernel.registers for kernel in graph.kernels)
    newer = {k.kernel for graph in found if graph.capability == 90 for k in graph.kernels}
    older = {k.kernel for graph in found if graph.capability == 75 for k in graph.kernels}
    assert any("cross_attention" in name for name in newer - older)
