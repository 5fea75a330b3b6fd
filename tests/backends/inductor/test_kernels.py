"""Our Triton kernels against float64, alone and within a graph of symbolic sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# Relative to the norm: rounding of the result, and of intermediate results in eager.
ERROR = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}
# Half a step of 8 bits, relative to each number or to the largest number of its row.
STEP = {torch.float8_e4m3fn: 1 / 16, torch.int8: 1 / 254}
TOKENS = [(2, 77, 1280), (1, 1, 320), (3, 45, 640), (2, 1024, 160)]


@pytest.fixture(scope="module")
def ops() -> Any:
    from onediff_ext.backends.inductor.kernels import register_kernels

    register_kernels()
    return torch.ops.onediff


def _noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape, device="cuda").to(dtype)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def _check_8_bits(
    int8_rows: torch.Tensor, scales: torch.Tensor, expected: torch.Tensor, largest: torch.Tensor
) -> None:
    """Check rows [M, K] and scales [M, 1] or [1]; `largest` [M, 1] or [1] defines the scale."""
    found, wanted = int8_rows.double() * scales.double(), expected.reshape(int8_rows.shape)
    if int8_rows.dtype is torch.int8:
        allowed = 1.01 * STEP[torch.int8] * largest
    else:
        allowed = 1.02 * STEP[int8_rows.dtype] * wanted.abs() + largest / 448 / 512
    # Earlier rounding to 16 bits may move a value across the middle of a step.
    assert ((found - wanted).abs() <= allowed + 2e-3 * wanted.abs()).all()
    assert _error(found, wanted) > 1e-3
    assert not found.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("added", [None, "one", "each"])
@pytest.mark.parametrize(
    "shape",
    [(2, 320, 64, 64), (1, 64, 1, 3), (3, 96, 45, 7), (2, 1280, 23, 23), (1, 128, 300, 200)],
)
def test_group_norm(
    ops: Any, shape: tuple[int, ...], added: str | None, silu: bool, dtype: torch.dtype
) -> None:
    x = (3 * _noise(*shape, dtype=dtype) + 20).contiguous(memory_format=torch.channels_last)
    weight, bias = _noise(shape[1], dtype=dtype), _noise(shape[1] + 1, dtype=dtype)[1:]
    other = None
    if added:
        other = _noise(1 if added == "one" else shape[0], shape[1], 1, 1, dtype=dtype)
    found = ops.group_norm(x, 32, weight, bias, 1e-5, silu, other)
    wide = x.double() if other is None else x.double() + other.double()
    expected = functional.group_norm(wide, 32, weight.double(), bias.double(), 1e-5)
    expected = functional.silu(expected) if silu else expected
    assert found.dtype == dtype
    assert _error(found, expected) < ERROR[dtype]


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_another_type(ops: Any, dtype: torch.dtype, rounded: bool) -> None:
    """A norm as under autocast: it reads and writes 16 bits and computes in float32."""
    x = (3 * _noise(2, 64, 33, 7, dtype=torch.float16) + 20).contiguous(
        memory_format=torch.channels_last
    )
    weight, bias = _noise(64, dtype=torch.float16), _noise(65, dtype=torch.float16)[1:]
    found = ops.group_norm(x, 32, weight, bias, 1e-5, True, None, dtype, rounded)
    wide = (weight.double(), bias.double())
    expected = functional.silu(functional.group_norm(x.double(), 32, *wide, 1e-5))
    assert found.dtype == dtype
    assert _error(found, expected) < ERROR[dtype]
    tokens = x.flatten(2).transpose(1, 2).contiguous()
    found = ops.layer_norm(tokens, weight, bias, 1e-5, dtype)
    assert found.dtype == dtype
    assert _error(found, functional.layer_norm(tokens.double(), (64,), *wide)) < ERROR[dtype]
    total, found = ops.add_layer_norm(tokens, tokens, weight, bias, 1e-5, dtype)
    assert (total.dtype, found.dtype) == (torch.float16, dtype)
    expected = functional.layer_norm((tokens + tokens).double(), (64,), *wide)
    assert _error(found, expected) < ERROR[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", TOKENS)
def test_layer_norm(ops: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, other = _noise(*shape, dtype=dtype) + 2, _noise(*shape, dtype=dtype)
    weight, bias = _noise(shape[-1], dtype=dtype), _noise(shape[-1] + 1, dtype=dtype)[1:]
    form, weights = shape[-1:], (weight.double(), bias.double())
    expected = functional.layer_norm(x.double(), form, *weights)
    assert _error(ops.layer_norm(x, weight, bias, 1e-5), expected) < ERROR[dtype]
    total, normed = ops.add_layer_norm(x, other, weight, bias, 1e-5)
    assert torch.equal(total, x + other)
    expected = functional.layer_norm((x + other).double(), form, *weights)
    assert _error(normed, expected) < ERROR[dtype]


@pytest.mark.parametrize("into", list(STEP))
@pytest.mark.parametrize("shape", TOKENS)
def test_layer_norm_in_8_bits(ops: Any, shape: tuple[int, ...], into: torch.dtype) -> None:
    dtype = torch.float16
    x, other = _noise(*shape, dtype=dtype), _noise(*shape, dtype=dtype)
    x[0, 0] = 0
    x[0, 0, -1] = 60  # the most that one number of a row can stand out
    weight, bias = _noise(shape[-1], dtype=dtype), _noise(shape[-1] + 1, dtype=dtype)[1:]
    for total in (x, x + other):
        expected = functional.layer_norm(total.double(), shape[-1:], weight.double(), bias.double())
        if total is x:
            int8_rows, scales = ops.layer_norm_in_8_bits(x, weight, bias, 1e-5, into)
        else:
            found, int8_rows, scales = ops.add_layer_norm_in_8_bits(
                x, other, weight, bias, 1e-5, into
            )
            assert torch.equal(found, total)
        largest = expected.abs().reshape(int8_rows.shape).amax(-1, keepdim=True)
        if into is not torch.int8:
            assert scales.shape == (1,)
            root = shape[-1] ** 0.5
            largest = (weight.double().abs() * root + bias.double().abs()).amax(0, keepdim=True)
        assert torch.allclose(scales.double(), largest / (448 if into != torch.int8 else 127), 1e-3)
        _check_8_bits(int8_rows, scales, expected, largest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1280, 5120, 96, 2])
def test_geglu(ops: Any, channels: int, dtype: torch.dtype) -> None:
    x = 3 * _noise(2, 37, 2 * channels, dtype=dtype)
    value, gate = x.double().chunk(2, dim=-1)
    expected = value * functional.gelu(gate)
    assert _error(ops.geglu(x), expected) < ERROR[dtype]
    if channels > 16:
        for into in STEP:
            int8_rows, scales = ops.geglu_in_8_bits(x, into)
            largest = expected.abs().reshape(int8_rows.shape).amax(-1, keepdim=True)
            found = (int8_rows.double() * scales.double()).reshape(expected.shape)
            assert _error(found, expected) < {torch.int8: 2e-2}.get(into, 4e-2)
            if dtype is not torch.bfloat16:
                _check_8_bits(int8_rows, scales, expected, largest)


def test_gelu_is_as_good_as_eagers(ops: Any) -> None:
    gate = torch.linspace(-12, 12, 100_000, device="cuda").reshape(1, 100, 1000)
    found = ops.geglu(torch.cat([torch.ones_like(gate), gate], dim=-1))
    error = (found.double() - functional.gelu(gate.double())).abs()
    assert (error <= 2e-7 * gate.abs().clamp_min(1)).all()


@pytest.mark.parametrize("into", list(STEP))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "before"), [(12288, 3072), (12288, 0), (6144, 0), (9728, 48), (96, 1280)]
)
def test_activated_rows(
    ops: Any, channels: int, before: int, dtype: torch.dtype, into: torch.dtype
) -> None:
    wide = 3 * _noise(2, 37, before + 2 * channels, dtype=dtype)  # a product of several layers
    x, gate = wide[..., before:].chunk(2, dim=-1)
    kept = _noise(37, 2, before, dtype=dtype).transpose(0, 1) if before else None
    silu = functional.silu(x.double()) * gate.double()
    gelu = functional.gelu(x.double(), approximate="tanh")
    for (rows, scales), fed in (
        (ops.gelu_in_8_bits(x, kept, into), gelu),
        (ops.swiglu_in_8_bits(x, gate, kept, into), silu),
    ):
        expected = fed if kept is None else torch.cat([kept.double(), fed], dim=-1)
        largest = expected.abs().reshape(rows.shape).amax(-1, keepdim=True)
        assert torch.allclose(scales.double(), largest / (448 if into != torch.int8 else 127), 1e-5)
        _check_8_bits(rows, scales, expected, largest)


def test_activated_rows_of_symbolic_sizes(ops: Any) -> None:
    """As in a single block of Flux: a part of a product, behind what attention computed."""
    into = torch.float8_e4m3fn

    def block(product: torch.Tensor, mixed: torch.Tensor) -> Any:
        return ops.gelu_in_8_bits(product[..., 96:], mixed.transpose(1, 2).flatten(2), into)

    compiled = torch.compile(block, dynamic=True, fullgraph=True)
    for batch, tokens in ((1, 45), (3, 7), (2, 2000)):
        product = 3 * _noise(batch, tokens, 96 + 320, dtype=torch.bfloat16)
        mixed = _noise(batch, 2, tokens, 64, dtype=torch.bfloat16)
        rows, scales = compiled(product, mixed)
        expected = torch.cat(
            [
                mixed.double().transpose(1, 2).flatten(2),
                functional.gelu(product[..., 96:].double(), approximate="tanh"),
            ],
            dim=-1,
        )
        largest = expected.abs().reshape(rows.shape).amax(-1, keepdim=True)
        _check_8_bits(rows, scales, expected, largest)


@pytest.mark.parametrize("into", list(STEP))
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_visible(ops: Any, bad: float, into: torch.dtype) -> None:
    weight, bias = _noise(640, dtype=torch.float16), _noise(641, dtype=torch.float16)[1:]
    x = _noise(2, 3, 640, dtype=torch.float16)
    x[1, 2, 5] = bad
    broken = weight.clone()
    broken[5] = bad
    gate = _noise(2, 3, 1280, dtype=torch.float16)
    gate[1, 2, 645] = bad
    for int8_rows, scales in (
        ops.rows_in_8_bits(x, into),
        ops.layer_norm_in_8_bits(x, weight, bias, 1e-5, into),
        ops.layer_norm_in_8_bits(_noise(2, 3, 640).half(), broken, bias, 1e-5, into),
        ops.add_layer_norm_in_8_bits(x, x, weight, bias, 1e-5, into)[1:],
        ops.geglu_in_8_bits(gate, into),
        ops.gelu_in_8_bits(x, None, into),
        ops.gelu_in_8_bits(_noise(2, 3, 640, dtype=torch.float16), x, into),
        ops.swiglu_in_8_bits(_noise(2, 3, 640, dtype=torch.float16), x, None, into),
    ):
        assert not (int8_rows.float() * scales)[5].isfinite().all()


@pytest.mark.parametrize("into", list(STEP))
def test_rows(ops: Any, into: torch.dtype) -> None:
    x = _noise(2, 37, 640, dtype=torch.float16)
    x[0, 0] = 0
    int8_rows, scales = ops.rows_in_8_bits(x, into)
    _check_8_bits(
        int8_rows, scales, x.double(), x.double().abs().reshape(74, 640).amax(-1, keepdim=True)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [40, 64, 80, 160])
def test_attention_to_a_prompt(width: int, dtype: torch.dtype) -> None:
    from onediff_ext.backends.inductor.kernels.rewrite import with_kernels

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, k, v)

    def inputs(batch: int, tokens: int, prompt: int) -> list[torch.Tensor]:
        sides = (tokens, prompt, prompt)  # as a layer's output is split into heads
        return [_noise(batch, n, 5, width, dtype=dtype).transpose(1, 2) for n in sides]

    batch, tokens, prompt = (torch.export.Dim.AUTO,) * 3
    program = torch.export.export(
        Attention(),
        tuple(inputs(2, 300, 77)),
        dynamic_shapes=({0: batch, 2: tokens}, {0: batch, 2: prompt}, {0: batch, 2: prompt}),
    )
    graph = with_kernels(program.graph_module)
    targets = [node.target for node in graph.graph.nodes]
    assert torch.ops.onediff.cross_attention.default in targets
    for size in ((1, 64, 77), (2, 1035, 154), (3, 7, 1)):
        q, k, v = inputs(*size)
        expected = functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
        assert _error(graph(q, k, v)[0], expected) < ERROR[dtype]


def test_a_graph_of_symbolic_sizes_serves_all(ops: Any) -> None:
    weight, bias = _noise(64), _noise(65)[1:]

    def block(x: torch.Tensor) -> torch.Tensor:
        normed = ops.group_norm(x, 32, weight, bias, 1e-5, True, None)
        tokens = normed.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 64)
        return ops.geglu(ops.layer_norm(tokens, weight, bias, 1e-5))

    def exact(x: torch.Tensor) -> torch.Tensor:
        w, b = weight.double(), bias.double()
        normed = functional.silu(functional.group_norm(x.double(), 32, w, b, 1e-5))
        tokens = normed.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 64)
        value, gate = functional.layer_norm(tokens, (64,), w, b, 1e-5).chunk(2, dim=-1)
        return value * functional.gelu(gate)

    compiled = torch.compile(block, dynamic=True, fullgraph=True)
    for size in ((2, 64, 24, 16), (3, 64, 5, 7), (2, 64, 180, 200)):
        x = _noise(*size).contiguous(memory_format=torch.channels_last)
        assert _error(compiled(x), exact(x)) < 1e-5


def _turned(y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    real, imaginary = y.unflatten(-1, (-1, 2)).unbind(-1)
    return y * cos + torch.stack([-imaginary, real], dim=-1).flatten(3) * sin


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 4096, 24, 128), (2, 45, 38, 64), (3, 1, 3, 16)])
@pytest.mark.parametrize("text", [0, 77])
def test_rotary_norm(
    ops: Any, dtype: torch.dtype, shape: tuple[int, int, int, int], text: int
) -> None:
    batch, tokens, heads, channels = shape
    wide = _noise(batch, tokens, 3 * heads * channels, dtype=dtype)  # query, key and value
    x = wide.chunk(3, dim=-1)[1].unflatten(-1, (heads, channels))
    words = _noise(batch, text, heads, channels, dtype=dtype)
    weights = [_noise(channels, dtype=dtype), _noise(2, channels, dtype=dtype)[1]]
    cos, sin = _noise(2, 1, text + tokens, 1, channels).unbind()
    if text:
        found = ops.joined_rotary_norm(words, x, *weights, 1e-6, cos, sin)
    else:
        found = ops.rotary_norm(x, weights[1], 1e-6, cos, sin)
    normed = [
        functional.rms_norm(part.double(), (channels,), weight.double(), 1e-6)
        for part, weight in zip((words, x), weights, strict=True)
    ]
    expected = _turned(torch.cat(normed, dim=1), cos.double(), sin.double())
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert _error(found, expected) < ERROR[dtype]
