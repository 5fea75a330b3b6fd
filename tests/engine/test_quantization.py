"""Linear layers in 8 bits are close to exact, and never use old weights."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from torch import nn
from torch.nn import functional

from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.family import BlockCall
from onediff_ext.engine.export.exporter import export_block, load_program, save_program
from onediff_ext.engine.quantization import (
    EightBitLinears,
    Quantization,
    QuantizedWeights,
    outlines,
    plan,
    unavailable_reason,
)
from onediff_ext.engine.quantized_linears import QuantizedLinears, quantize_rows
from onediff_ext.engine.running.fp16_accumulation import accumulation
from onediff_ext.engine.torch_versions import RELEASE
from onediff_ext.hosts.diffusers.blocks import TransformerFamily

CPU = torch.device("cpu")
LINEARS = TransformerFamily.eight_bits or EightBitLinears()
# Relative error of a whole block, measured on the block below: 1.2e-2 (fp8) and 4e-3 (int8).
ERROR = {"fp8": 3e-2, "int8": 1e-2}


def _block() -> BasicTransformerBlock:
    torch.manual_seed(0)
    return BasicTransformerBlock(64, 2, 32, cross_attention_dim=48, activation_fn="geglu").eval()


def _call(batch: int = 2, tokens: int = 20) -> BlockCall:
    family = TransformerFamily()
    call = family.bind(
        _block(),
        (torch.randn(batch, tokens, 64),),
        {"encoder_hidden_states": torch.randn(batch, 17, 48)},
    )
    assert isinstance(call, BlockCall)
    return call


def _traced(
    precision: str, call: BlockCall, autocast: tuple[str, torch.dtype] | None = None
) -> tuple[torch.export.ExportedProgram, Quantization, list[torch.Tensor]]:
    """The test's block in 8 bits, how it was planned, and its weights."""
    family = TransformerFamily()
    tree = BlockTree.of(_block(), family)
    weights = tree.weights()
    assert weights is not None
    quantization = plan(tree.names, weights, precision, LINEARS)
    assert quantization is not None
    program = export_block(
        tree.copy(), family, tree.names, outlines(weights, quantization), call, CPU, autocast,
        quantization=quantization,
    )  # fmt: skip
    return program, quantization, weights


def test_the_key_entry_is_spelled_as_in_stored_graphs() -> None:
    entry = Quantization("fp8", ((0, 1, 2), (3,))).key_entry
    assert entry == "Quantisation(precision='fp8', groups=((0, 1, 2), (3,)))"


fp8_by_rows = pytest.mark.skipif(
    RELEASE < (2, 11), reason=f"torch {torch.__version__} multiplies fp8 by rows on GPUs only"
)


@pytest.mark.parametrize("precision", [pytest.param("fp8", marks=fp8_by_rows), "int8"])
def test_a_quantized_block_is_close_to_the_exact_one_at_any_size(precision: str) -> None:
    block, family, call = _block(), TransformerFamily(), _call()
    program, quantization, weights = _traced(precision, call)
    graph = load_program(save_program(program)).graph_module
    copies = QuantizedWeights(quantization)
    for batch, tokens in ((2, 20), (1, 35), (3, 7)):
        call = _call(batch, tokens)
        with torch.no_grad():
            expected = family.run(block, call.tensors, dict(call.statics))
            found = graph(*copies.apply(weights, 0), *call.tensors)[0]
        error = (torch.linalg.vector_norm(found - expected) / expected.norm()).item()
        assert 1e-4 < error < ERROR[precision]  # exact would mean that nothing was quantized


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_it_is_traced_without_a_gpu_under_a_gpus_autocast(precision: str) -> None:
    program, _, _ = _traced(precision, _call(), ("cuda", torch.float16))
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"fp8": "aten._scaled_mm.default", "int8": "aten._int_mm.default"}[precision] in targets


class _CastingLinear(nn.Linear):
    """A linear layer like Forge's: it casts its weight to its input's type by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(device=x.device, dtype=x.dtype, non_blocking=True)
        return functional.linear(x, weight, self.bias.to(x))


class _Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn1 = nn.Module()
        for name in ("to_q", "to_k", "to_v"):
            setattr(self.attn1, name, _CastingLinear(32, 48))
        self.proj = _CastingLinear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attention = self.attn1
        parts = attention.to_q(x), attention.to_k(x), attention.to_v(x), self.proj(x)
        return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("precision", [pytest.param("fp8", marks=fp8_by_rows), "int8"])
@torch.no_grad()
def test_layers_that_cast_their_weights_by_hand(precision: str) -> None:
    torch.manual_seed(0)
    block, x = _Projections(), torch.randn(3, 7, 32)
    names, weights = zip(*block.named_parameters(), strict=True)
    quantization = plan(names, weights, precision, LINEARS)
    assert quantization is not None
    assert sorted(map(len, quantization.groups)) == [1, 3]
    taken = QuantizedWeights(quantization).apply(weights, 0)
    with QuantizedLinears(quantization, taken):
        named = dict(zip(names, taken, strict=False))
        found = torch.func.functional_call(block, named, (x,))
    expected = block(x)
    error = (torch.linalg.vector_norm(found - expected) / expected.norm()).item()
    assert 1e-4 < error < 2 * ERROR[precision]


def test_layers_with_one_input_are_one_product() -> None:
    tree = BlockTree.of(_block(), TransformerFamily())
    weights = tree.weights()
    assert weights is not None
    quantization = plan(tree.names, weights, "fp8", LINEARS)
    assert quantization is not None
    groups = [tuple(tree.names[i] for i in group) for group in quantization.groups]
    assert ("attn1.to_q.weight", "attn1.to_k.weight", "attn1.to_v.weight") in groups
    assert ("attn2.to_k.weight", "attn2.to_v.weight") in groups
    assert ("attn2.to_q.weight",) in groups
    # All linear layers, each once, but those behind an attention; norms are left alone.
    assert sum(map(len, groups)) == 8
    assert not any("to_out" in name for group in groups for name in group)


def test_layers_whose_sizes_do_not_fit_stay_exact() -> None:
    weights = [torch.randn(64, 30), torch.randn(64), torch.randn(64, 32, 3, 3)]
    names = ["proj.weight", "norm.weight", "conv.weight"]
    assert plan(names, weights, "fp8", LINEARS) is None


def _copies(weights: list[torch.Tensor]) -> tuple[QuantizedWeights, list[torch.Tensor]]:
    quantization = plan(["a.weight", "b.weight"], weights, "fp8", LINEARS)
    assert quantization is not None
    copies = QuantizedWeights(quantization)
    return copies, copies.apply(weights, generation=1)


def test_a_weight_written_in_place_is_seen_at_once_and_in_the_same_memory() -> None:
    weights = [torch.randn(32, 16), torch.randn(48, 16)]
    copies, taken = _copies(weights)
    places = [t.data_ptr() for t in taken]
    weights[0].mul_(-1)  # a LoRA merged into the weight
    copies.apply(weights, generation=1)
    _, expected = _copies(weights)
    assert torch.equal(taken[0].float(), expected[0].float())
    assert torch.equal(taken[2], expected[2])
    assert [t.data_ptr() for t in taken] == places  # where a CUDA graph reads


def test_copies_are_made_again_with_another_generation_of_contents_only() -> None:
    weights = [torch.randn(32, 16), torch.randn(48, 16)]
    copies, taken = _copies(weights)
    before = taken[0].float()
    weights[0].data.neg_()  # leaves the version counter alone
    copies.apply(weights, generation=1)
    assert torch.equal(taken[0].float(), before)
    assert not copies.was_made
    copies.apply(weights, generation=2)
    assert copies.was_made
    assert torch.equal(taken[0].float(), -before)


def test_another_tensor_in_the_weights_place_is_seen() -> None:
    weights = [torch.randn(32, 16), torch.randn(48, 16)]
    copies, taken = _copies(weights)
    other = [torch.randn(32, 16), weights[1]]
    again = copies.apply(other, generation=1)
    assert again[0].data_ptr() == taken[0].data_ptr()
    assert torch.equal(again[0].float(), _copies(other)[1][0].float())


def test_a_row_of_zeros_stays_zero() -> None:
    rows, scales = quantize_rows(torch.zeros(3, 16), "fp8")
    assert torch.equal(rows.float() * scales, torch.zeros(3, 16))
    _, taken = _copies([torch.zeros(32, 16), torch.zeros(16, 16)])
    assert torch.equal(taken[0].float() * taken[2], torch.zeros(32, 16))


def test_an_input_with_a_bound_has_one_scale_and_never_runs_over() -> None:
    x = torch.nn.functional.layer_norm(torch.randn(50, 64).exp() ** 4, (64,))
    x[0] = 0
    x[0, 3] = 8  # the most that 64 normalised numbers can have
    rows, scale = quantize_rows(x, "fp8", torch.tensor([8.0]))
    assert scale.shape == (1,)
    assert (rows.float() * scale).max() == 8
    assert torch.allclose(rows.float() * scale, x, rtol=1 / 16, atol=8 / 448 / 512)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_copies_are_the_weights_within_8_bits(precision: str) -> None:
    weight = torch.randn(32, 64)
    quantization = plan(["a.weight"], [weight], precision, LINEARS)
    assert quantization is not None
    rows, scales, *_ = QuantizedWeights(quantization).apply([weight], 0)
    most = weight.abs().amax() if precision == "fp8" else weight.abs().amax(-1, keepdim=True)
    # Half a step: of an exponent in fp8, of the whole range in int8.
    allowed = weight.abs() / 16 + most / 2**9 if precision == "fp8" else most / 253
    assert ((rows.float() * scales.t() - weight).abs() <= allowed).all()


def test_a_cpu_is_told_why_it_gets_no_8_bits() -> None:
    assert unavailable_reason("fp8", CPU) == "fp8 is for GPUs"


@pytest.mark.skipif(RELEASE < (2, 7), reason=f"torch {torch.__version__} has no such setting")
def test_accumulation_is_as_it_was_afterwards_on_errors_too() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_accumulation
    with accumulation("exact"):
        assert matmul.allow_fp16_accumulation == before
    drawing = accumulation("fp16-accumulation")
    with pytest.raises(ValueError, match="drawn"), drawing:
        _fail_within(matmul)
    assert matmul.allow_fp16_accumulation == before


def _fail_within(matmul: object) -> None:
    assert matmul.allow_fp16_accumulation  # type: ignore[attr-defined]
    raise ValueError("drawn")


@pytest.mark.skipif(RELEASE < (2, 7), reason=f"torch {torch.__version__} has no such setting")
def test_accumulation_of_two_threads_ends_with_the_last_one() -> None:
    """Forwards of two threads begin and end in any order."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_accumulation
    first, second = accumulation("fp16-accumulation"), accumulation("fp16-accumulation")
    try:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert matmul.allow_fp16_accumulation  # the second forward still runs
        second.__exit__(None, None, None)
        assert matmul.allow_fp16_accumulation == before
    finally:
        matmul.allow_fp16_accumulation = before
