"""Which kernels an exported block gets, read from its graph; needs Triton, but no GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from onediff_ext.engine.export.autocast import CudaAutocast
from onediff_ext.engine.quantization import EightBitLinears, QuantizedWeights, plan
from onediff_ext.engine.quantized_linears import QuantizedLinears
from tests.support.ldm_stand_in import BasicTransformerBlock, CrossAttention, ResBlock

pytest.importorskip("triton", reason="Triton, which comes with torch for GPUs, is not installed")

LINEARS = EightBitLinears(
    together=(("attn1.to_q", "attn1.to_k", "attn1.to_v"), ("attn2.to_k", "attn2.to_v")),
    exact=("to_out.0",),
)


class GroupNorm32(nn.GroupNorm):
    """GroupNorm of CompVis' UNets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).type(x.dtype)


class Normed(nn.Module):
    """A norm, and what follows it."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.then = nn.GroupNorm(4, 16), then
        self.convolution = nn.Conv2d(16, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(self.then(self.norm(self.convolution(x))))


class UnderAutocast(nn.Module):
    """A block as it is traced for a GPU."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        with CudaAutocast(torch.float16):
            output: torch.Tensor = self.block(*tensors)
        return output


def rewritten(module: nn.Module, *arguments: Any) -> Any:
    from onediff_ext.backends.inductor.kernels.rewrite import with_kernels

    with torch.no_grad():
        program = torch.export.export(module.eval(), arguments, strict=False)
        return with_kernels(program.graph_module)


def calls(graph: Any) -> Counter[str]:
    """Count the calls of our kernels by name, and casts as "cast"."""
    found: Counter[str] = Counter()
    for node in graph.graph.nodes:
        name = str(node.target)
        if name.startswith("onediff."):
            found[name.split(".")[1]] += 1
        elif node.target is torch.ops.aten.to.dtype:
            found["cast"] += 1
    return found


def only(graph: Any, name: str) -> Any:
    (node,) = [n for n in graph.graph.nodes if str(n.target).startswith(f"onediff.{name}.")]
    return node


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


@pytest.fixture
def traceable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in the form that a block runner prepares."""

    def forward(
        self: Any, x: torch.Tensor, context: torch.Tensor | None = None, mask: None = None
    ) -> torch.Tensor:
        context = x if context is None else context
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.to_out(mixed.transpose(1, 2).flatten(2))

    monkeypatch.setattr(CrossAttention, "forward", forward)


@pytest.mark.parametrize("norm", [GroupNorm32, nn.GroupNorm])
def test_a_residual_block_under_autocast_casts_nothing(norm: type[nn.GroupNorm]) -> None:
    block = ResBlock(16, 12, 32)
    block.in_layers[0], block.out_layers[0] = norm(8, 16), norm(8, 32)
    graph = rewritten(UnderAutocast(block.half()), half(2, 16, 8, 8), half(2, 12))
    assert calls(graph) == {"group_norm": 2}
    norms = [n for n in graph.graph.nodes if "group_norm" in str(n.target)]
    for node in norms:
        assert node.args[5]  # SiLU
        assert node.args[7:] == (torch.float16, norm is GroupNorm32)
        assert node.meta["val"].dtype is torch.float16
    # The second norm adds the first convolution's bias and the time embedding.
    assert [node.args[6] is not None for node in norms] == [False, True]


@pytest.mark.parametrize(
    ("then", "dtype", "silu"),
    [
        (lambda x: x * torch.sigmoid(x), torch.float16, True),
        (lambda x: torch.sigmoid(x) * x, torch.float16, True),
        (lambda x: functional.dropout(x * torch.sigmoid(x), 0.0), torch.float16, True),
        (lambda x: x * torch.sigmoid(x + 1), torch.float32, False),
        (lambda x: x, torch.float16, False),
        (lambda x: x + x.half(), torch.float32, False),
    ],
)
def test_what_follows_a_norm(
    then: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, silu: bool
) -> None:
    node = only(rewritten(UnderAutocast(Normed(then).half()), half(2, 16, 8, 8)), "group_norm")
    assert node.args[5] is silu
    assert node.args[7] is dtype
    assert node.args[0].meta["val"].dtype is torch.float16
    assert node.args[6] is not None  # the convolution's bias


def test_what_others_read_is_computed_whole() -> None:
    class Both(Normed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = self.convolution(x).float()
            return self.norm(wide) + wide

    node = only(
        rewritten(UnderAutocast(Both(functional.silu).half()), half(2, 16, 8, 8)), "group_norm"
    )
    assert node.args[6] is None


@pytest.mark.usefixtures("traceable")
def test_a_transformer_under_autocast_casts_nothing() -> None:
    block = BasicTransformerBlock(32, 2, 24).half()
    graph = rewritten(UnderAutocast(block), half(2, 9, 32), half(2, 7, 24))
    assert calls(graph) == {
        "layer_norm": 1, "add_layer_norm": 2, "cross_attention": 1, "geglu": 1
    }  # fmt: skip


@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_8_bits_come_from_the_kernels_before_them(precision: str, autocast: bool) -> None:
    block = BasicTransformerBlock(32, 2, 48).half().requires_grad_(False)
    names, weights = zip(*block.named_parameters(), strict=True)
    quantization = plan(names, weights, precision, LINEARS)
    assert quantization is not None

    class Quantized(nn.Module):
        def forward(self, weights: Any, *tensors: torch.Tensor) -> torch.Tensor:
            dtype = torch.float16 if autocast else None
            named = dict(zip(names, weights, strict=False))
            with QuantizedLinears(quantization, weights, dtype):
                output: torch.Tensor = torch.func.functional_call(block, named, tensors)
            return output

    taken = QuantizedWeights(quantization).apply(weights, 0)
    module = UnderAutocast(Quantized()) if autocast else Quantized()
    found = calls(rewritten(module, taken, half(2, 9, 32), half(2, 7, 48)))
    del found["cast"]  # of products
    assert found == {
        "layer_norm_in_8_bits": 1, "add_layer_norm_in_8_bits": 2, "rows_in_8_bits": 1,
        "cross_attention": 1, "geglu_in_8_bits": 1,
    }  # fmt: skip


class CastingNorm(nn.LayerNorm):
    """A layer like Forge's, which casts its weights to its input's type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        form: dict[str, Any] = {"device": x.device, "dtype": x.dtype, "non_blocking": True}
        weight, bias = self.weight.to(**form), self.bias.to(**form)
        return functional.layer_norm(x, self.normalized_shape, weight, bias)


class AddsInPlace(nn.Module):
    """A residual sum of Forge's transformers, and the norm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(32, 32), CastingNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x += self.layer(x)
        normed: torch.Tensor = self.norm(x)
        return normed + x


def test_forges_layers_cast_weights_that_have_the_type_already() -> None:
    graph = rewritten(AddsInPlace().half(), half(2, 9, 32))
    assert calls(graph) == {"add_layer_norm": 1}


def test_a_weight_that_is_really_cast_stands_behind_the_sum() -> None:
    block = AddsInPlace().half()
    block.norm.to(torch.float8_e4m3fn)  # stored so, as the host can
    graph = rewritten(block, half(2, 9, 32))
    assert calls(graph) == {"layer_norm": 1}  # not the sum's, which comes before the cast
    graph.graph.lint()


class Rotated(nn.Module):
    """RoPE on pairs of neighbours, as Flux has it."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        rotated = torch.stack([-imaginary, real], dim=-1).flatten(3)
        return (x.float() * cos + rotated.float() * sin).to(x.dtype)


def test_rotated_pairs_are_a_swap_of_neighbours() -> None:
    x, tables = torch.randn(2, 5, 3, 8).bfloat16(), torch.randn(2, 5, 1, 8).unbind()
    graph = rewritten(Rotated(), x, *tables)
    targets = {str(node.target) for node in graph.graph.nodes}
    assert "aten.flip.default" in targets
    assert not targets & {"aten.stack.default", "aten.neg.default", "aten.unbind.int"}
    (found,) = graph(x, *tables)
    torch.testing.assert_close(found, Rotated()(x, *tables), rtol=0, atol=0)


class NormedAndRotated(nn.Module):
    """Queries as Flux has them: each head normed, text before image, then turned."""

    def __init__(self, channels: int = 16, affine: bool = True) -> None:
        super().__init__()
        self.text_norm, self.norm = (
            nn.RMSNorm(channels, 1e-6, affine).requires_grad_(False) for _ in range(2)
        )
        self.rotated = Rotated()

    def forward(
        self, x: torch.Tensor, text: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        x = self.norm(x)
        if text is not None:
            x = torch.cat([self.text_norm(text), x], dim=1)
        found: torch.Tensor = self.rotated(x, cos, sin)
        return found


def tokens_to_rotate(text: int, channels: int = 16) -> list[Any]:
    x, words = (torch.randn(2, n, 3, channels).bfloat16() for n in (5, text))
    return [x, words if text else None, *torch.randn(2, 1, 5 + text, 1, channels).unbind()]


@pytest.mark.parametrize("text", [0, 4])
def test_a_norm_and_its_rotation_are_one_kernel(text: int) -> None:
    graph = rewritten(NormedAndRotated().bfloat16(), *tokens_to_rotate(text))
    assert calls(graph) == {"joined_rotary_norm" if text else "rotary_norm": 1}
    targets = {str(node.target) for node in graph.graph.nodes}
    assert not targets & {"aten.stack.default", "aten.flip.default", "aten.rms_norm.default"}
    graph.graph.lint()


class ReadTwice(NormedAndRotated):
    """What is normed has another reader."""

    def forward(self, x: Any, text: Any, cos: Any, sin: Any) -> torch.Tensor:
        normed = self.norm(x)
        found: torch.Tensor = self.rotated(normed, cos, sin) + normed
        return found


@pytest.mark.parametrize(
    ("module", "channels"),
    [
        (NormedAndRotated(24), 24),
        (NormedAndRotated(affine=False), 16),
        (ReadTwice(), 16),
    ],
)
def test_other_norms_and_rotations_are_not(module: nn.Module, channels: int) -> None:
    given = tokens_to_rotate(0, channels)
    graph = rewritten(module.bfloat16(), *given)
    assert set(calls(graph)) <= {"cast"}
    assert "aten.flip.default" in {str(node.target) for node in graph.graph.nodes}


@pytest.mark.parametrize("halves", [lambda a, b: (a, -b), lambda a, b: (-a, b)])
def test_other_stacks_stay(halves: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    class Stacked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack(halves(*x.unbind(-1)), dim=-1)

    x = torch.randn(2, 5, 2)
    graph = rewritten(Stacked(), x)
    assert "aten.stack.default" in {str(node.target) for node in graph.graph.nodes}
    torch.testing.assert_close(graph(x)[0], Stacked()(x))


def test_an_inferred_size_that_is_always_the_same_is_a_number() -> None:
    class Paired(nn.Module):
        def forward(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
            both = torch.cat([text, image], dim=1)
            pairs = both.reshape(*both.shape[:-1], -1, 2)
            return pairs.reshape(both.shape[0], -1, 8)  # this one depends on the tokens

    from onediff_ext.backends.inductor.kernels.rewrite import with_kernels

    batch, few, many = (torch.export.Dim(name, min=1, max=512) for name in ("b", "few", "many"))
    given = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    program = torch.export.export(
        Paired(), given, dynamic_shapes=({0: batch, 1: few}, {0: batch, 1: many}), strict=False
    )
    graph = with_kernels(program.graph_module)
    sizes = [node.args[1] for node in graph.graph.nodes if "reshape" in str(node.target)]
    assert [size[-2:] for size in sizes] == [[4, 2], [-1, 8]]
    torch.testing.assert_close(graph(*given)[0], Paired()(*given))


class Feeds(nn.Module):
    """A feed-forward network of tokens that two streams join in, and are cut from again."""

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(16 + 64, 16)
        self.act = nn.GELU(approximate=approximate)

    def forward(self, text: torch.Tensor, image: torch.Tensor, gate: torch.Tensor) -> Any:
        both = torch.cat([text, image], dim=1)
        normed = self.norm(both) * (1 + gate)
        fed = self.narrow(torch.cat([normed, self.act(self.wide(normed))], dim=2))
        out = both + gate * fed
        return out[:, : text.shape[1]], out[:, text.shape[1] :]


def feeds(approximate: str = "tanh") -> tuple[Any, Any, list[torch.Tensor]]:
    from onediff_ext.backends.inductor.kernels.rewrite import with_kernels

    torch.manual_seed(0)
    block = Feeds(approximate).bfloat16().eval().requires_grad_(False)
    batch, few, many = (torch.export.Dim(name, min=1, max=512) for name in ("b", "few", "many"))
    given = [torch.randn(2, n, 16).bfloat16() for n in (3, 5, 1)]
    shapes = ({0: batch, 1: few}, {0: batch, 1: many}, {0: batch})
    program = torch.export.export(block, tuple(given), dynamic_shapes=shapes, strict=False)
    return block, with_kernels(program.graph_module), given


def targets_of(graph: Any) -> Counter[str]:
    return Counter(str(node.target) for node in graph.graph.nodes)


def test_gelu_is_part_of_its_product_and_nothing_is_joined_for_one() -> None:
    block, graph, given = feeds()
    found = targets_of(graph)
    assert found["aten._addmm_activation.default"] == 1
    assert not found["aten.gelu.default"]
    assert found["aten.cat.default"] == 1  # of text and image; not of the channels
    assert found["aten.linear.default"] == 2  # one for each part of the channels
    for mine, theirs in zip(graph(*block.parameters(), *given), block(*given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def test_what_products_read_is_written_once() -> None:
    _, graph, _ = feeds()
    (written,) = [n for n in graph.graph.nodes if str(n.target) == "onediff.written.default"]
    assert len(written.users) >= 2  # both products read it


def test_each_part_of_an_output_is_computed_by_itself() -> None:
    _, graph, _ = feeds()
    texts, images = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    for part, place in ((texts, 0), (images, 1)):
        assert part.target is torch.ops.aten.add.Tensor
        joined = next(n for n in graph.graph.nodes if n.target is torch.ops.aten.cat.default)
        assert part.args[0] is joined.args[0][place]


def test_the_exact_gelu_stays_outside_of_its_product() -> None:
    found = targets_of(feeds("none")[1])
    assert found["aten.gelu.default"] == 1
    assert not found["aten._addmm_activation.default"]


class CutSums(nn.Module):
    """Sums of tensors with fewer dims, cut along each dim."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor, table: torch.Tensor, vector: torch.Tensor) -> Any:
        total = (x + table) * vector
        return [torch.ops.aten.slice.Tensor(total, self.dim, start, 4) for start in (0, 1)]


@pytest.mark.parametrize("dim", [1, 2, -1, -2])
@pytest.mark.parametrize("rows", [5, 1])
def test_parts_of_a_sum_with_fewer_dims_are_cut_along_their_own(dim: int, rows: int) -> None:
    given = torch.randn(2, 5, 6), torch.randn(rows, 6), torch.randn(6)
    graph = rewritten(CutSums(dim), *given)
    for mine, theirs in zip(graph(*given), CutSums(dim)(*given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
