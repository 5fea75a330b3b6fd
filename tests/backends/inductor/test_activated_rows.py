"""GELU and SwiGLU that are quantized in one kernel, and biases of a product, read from graphs.

The kernel itself runs on a CPU, in Triton's interpreter. Needs Triton, but no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from onediff_ext.engine.quantization import EightBitLinears, QuantizedWeights, plan
from onediff_ext.engine.quantized_linears import QuantizedLinears
from onediff_ext.engine.torch_versions import RELEASE

pytest.importorskip("triton", reason="Triton, which comes with torch for GPUs, is not installed")

LIMITS = {torch.float8_e4m3fn: 448, torch.int8: 127}
# Relative to the largest number of a row: half of a step of int8, or what float32 rounds.
ALLOWED = {torch.int8: 0.5001 / 127, torch.float8_e4m3fn: 1e-6}
LINEARS = EightBitLinears(together=(("query", "wide"),))


class Block(nn.Module):
    """One stream of a transformer: a norm, layers that read it, and a feed-forward network."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.norm = nn.LayerNorm(32, elementwise_affine=False)
        width = 192 if "gated" in form else 96
        self.query, self.wide = nn.Linear(32, 48), nn.Linear(32, width)
        if "without a bias" in form:
            self.query.bias = None
        self.narrow = nn.Linear(96 + (48 if "joined" in form else 0), 32)

    def forward(self, x: torch.Tensor) -> Any:
        normed = self.norm(x)
        query, wide = self.query(normed), self.wide(normed)
        if "read whole" in self.form:
            query = query + functional.linear(normed, self.query.weight)
        if "gated" in self.form:
            half, gate = wide.chunk(2, dim=-1)
            fed = functional.silu(half) * gate
        else:
            fed = functional.gelu(wide, approximate="none" if "exact" in self.form else "tanh")
        if "joined" in self.form:
            parts = [fed, query] if "behind" in self.form else [query, fed]
            return self.narrow(torch.cat(parts, dim=2))
        return (self.narrow(fed), query) + ((fed,) if "returned" in self.form else ())


def traced(form: str, precision: str = "fp8") -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """Return a block's graph for any number of pictures and tokens, and arguments for it."""
    torch.manual_seed(0)
    block = Block(form).bfloat16().requires_grad_(False)
    names, weights = zip(*block.named_parameters(), strict=True)
    quantization = plan(names, weights, precision, LINEARS)
    assert quantization is not None

    class Quantized(nn.Module):
        def forward(self, weights: Any, x: torch.Tensor) -> Any:
            named = dict(zip(names, weights, strict=False))
            with QuantizedLinears(quantization, weights):
                return torch.func.functional_call(block, named, (x,))

    taken = QuantizedWeights(quantization).apply(weights, 0)
    x = torch.randn(2, 20, 32).bfloat16()
    batch, tokens = (torch.export.Dim(name, min=1, max=512) for name in ("batch", "tokens"))
    with torch.no_grad():
        program = torch.export.export(
            Quantized(),
            (taken, x),
            dynamic_shapes=([None] * len(taken), {0: batch, 1: tokens}),
            strict=False,
        )
    return program.graph_module, [*taken, x]


def calls(graph: torch.fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in graph.graph.nodes)


def rewritten(form: str, precision: str = "fp8") -> torch.fx.GraphModule:
    from onediff_ext.backends.inductor.kernels.rewrite import with_kernels

    graph = with_kernels(traced(form, precision)[0])
    graph.graph.lint()
    return graph


def arguments(graph: torch.fx.GraphModule, name: str) -> tuple[Any, ...]:
    (node,) = [n for n in graph.graph.nodes if str(n.target) == f"onediff.{name}.default"]
    return tuple(node.args)


@pytest.mark.parametrize(("precision", "dtype"), [("fp8", "float8_e4m3fn"), ("int8", "int8")])
@pytest.mark.parametrize("form", ["plain", "joined", "gated", "gated joined"])
def test_an_activation_and_its_quantization_are_one_kernel(
    form: str, precision: str, dtype: str
) -> None:
    graph = rewritten(form, precision)
    name = "swiglu_in_8_bits" if "gated" in form else "gelu_in_8_bits"
    *sources, before, given = arguments(graph, name)
    assert given is getattr(torch, dtype)
    assert {source.meta["val"].shape[-1] for source in sources} == {96}
    assert (before is not None) == ("joined" in form)
    assert before is None or before.meta["val"].shape[-1] == 48
    found = calls(graph)
    gone = ("aten.gelu.default", "aten.silu.default", "aten.amax.default")
    assert not any(found[each] for each in gone[: 2 if precision == "int8" else 3])


@pytest.mark.parametrize(
    "form", ["exact", "exact joined", "joined behind", "returned", "gated returned"]
)
def test_other_activations_stay(form: str) -> None:
    found = calls(rewritten(form))
    assert found["aten.gelu.default"] + found["aten.silu.default"] == 1
    assert not found["onediff.gelu_in_8_bits.default"] + found["onediff.swiglu_in_8_bits.default"]


def test_biases_of_one_product_are_in_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    if RELEASE < (2, 11):
        pytest.skip(f"torch {torch.__version__} multiplies fp8 by rows on GPUs only")
    from onediff_ext.backends.inductor.kernels import rewrite

    graph, given = traced("plain")
    monkeypatch.setattr(rewrite, "_REWRITES", {})  # kernels do not run here
    found = rewrite.with_kernels(graph)
    found.graph.lint()
    assert calls(graph)["aten.add.Tensor"] == 3
    assert calls(found)["aten.add.Tensor"] == 1  # of the product with a scale for each row
    products = [n for n in found.graph.nodes if n.target is torch.ops.aten._scaled_mm.default]
    assert [n.args[4] is not None for n in products] == [True, False]
    (fed, query), (fed_before, query_before) = found(*given), graph(*given)
    # The sum with a bias is rounded once less, which may move numbers to another step of fp8.
    torch.testing.assert_close(query, query_before, rtol=2**-7, atol=2**-7)
    assert (fed - fed_before).norm() < 2e-2 * fed_before.norm()


@pytest.mark.parametrize("form", ["without a bias", "read whole"])
def test_other_parts_keep_their_sums(form: str) -> None:
    graph = rewritten(form)
    products = [n for n in graph.graph.nodes if n.target is torch.ops.aten._scaled_mm.default]
    assert products[0].args[4] is None


INTERPRETED = """
import sys
import torch
from onediff_ext.backends.inductor.kernels import activated_rows as rows
from onediff_ext.backends.inductor.kernels.int8_rows import LIMITS

def run(x, gate, before, limited, dtype):
    activation = rows.GELU if gate is None else rows.SILU
    batch, tokens, channels = x.shape
    gated, joined = (x if given is None else given for given in (gate, before))
    joined_channels = 0 if before is None else before.shape[2]
    q = torch.empty(batch * tokens, joined_channels + channels, dtype=dtype)
    scale = torch.empty(batch * tokens, 1)
    rows.activated_rows_kernel[(batch * tokens,)](
        x, gated, joined, q, scale, tokens, channels, joined_channels,
        *x.stride()[:2], *gated.stride()[:2], *joined.stride()[:2],
        GATED=gate is not None, LIMIT=LIMITS[limited], **activation,
        **rows.parts_of(channels, joined_channels),
    )
    return q.double() * scale, scale.double()

given = torch.load(sys.argv[1], weights_only=True)
torch.save({name: run(*arguments) for name, arguments in given.items()}, sys.argv[1])
"""
FORMS = ("plain", "joined", "gated joined", "joined broken")
# The interpreter rounds to fp8 wrongly, so it writes what would be rounded.
WRITTEN = {torch.int8: torch.int8, torch.float8_e4m3fn: torch.float32}


def parts(form: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return an input, its gate and what is before it: parts of wider rows [2, 3, ...]."""
    torch.manual_seed(1)
    product = 3 * torch.randn(2, 3, 40 + 96 + 96).bfloat16()
    x, gate = product[..., 40:136], product[..., 136:]
    before = 4 * torch.randn(3, 2, 50).bfloat16().transpose(0, 1)
    if "broken" in form:
        x[1, 2, 95] = float("nan")
    return x, gate if "gated" in form else None, before if "joined" in form else None


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    """What the kernel computes on a CPU: values and scales by form and type."""
    path = tmp_path_factory.mktemp("interpreted") / "arguments.pt"
    given = {
        f"{form} {limited}": (*parts(form), limited, dtype)
        for form in FORMS
        for limited, dtype in WRITTEN.items()
    }
    torch.save(given, path)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED, str(path)], env=environment, check=True)
    found: dict[str, list[torch.Tensor]] = torch.load(path, weights_only=True)
    return found


@pytest.mark.parametrize("limited", list(WRITTEN))
@pytest.mark.parametrize("form", FORMS)
def test_the_kernel_in_the_interpreter_of_triton(
    interpreted: dict[str, list[torch.Tensor]], form: str, limited: torch.dtype
) -> None:
    found, scale = interpreted[f"{form} {limited}"]
    x, gate, before = parts(form)
    expected = functional.gelu(x.double(), approximate="tanh")
    if gate is not None:
        expected = functional.silu(x.double()) * gate.double()
    if before is not None:
        expected = torch.cat([before.double(), expected], dim=2)
    expected = expected.reshape(found.shape)
    if "broken" in form:
        assert not found[5].isfinite().all()
        found, scale, expected = found[:5], scale[:5], expected[:5]
    largest = expected.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scale, largest / LIMITS[limited], rtol=1e-6, atol=0)
    assert ((found - expected).abs() <= ALLOWED[limited] * largest).all()
