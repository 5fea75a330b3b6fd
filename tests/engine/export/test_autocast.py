"""A forked child writes down the casts that autocast makes on a GPU, without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from onediff_ext.core.errors import ExportError
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.family import BlockCall, BlockFamily
from onediff_ext.engine.export import autocast
from onediff_ext.engine.export.autocast import CudaAutocast
from onediff_ext.engine.export.disabled_autocast import inline_disabled_autocast
from onediff_ext.engine.export.exporter import (
    export_block,
    input_fakes,
    load_program,
    save_program,
)
from onediff_ext.engine.torch_versions import RELEASE
from onediff_ext.hosts.diffusers.blocks import ResnetFamily, TransformerFamily

Function = Callable[..., torch.Tensor]

# name → a call of it with a [2, 8, 8] and another tensor like it.
CALLS: dict[str, Function] = {
    "conv2d": lambda x, _: functional.conv2d(x[None], x[:, :2, :1, None].expand(2, 2, 3, 3)),
    "linear": functional.linear,
    "matmul": torch.matmul,
    "__matmul__": lambda x, y: x @ y,
    "bmm": torch.bmm,
    "baddbmm": lambda x, y: torch.baddbmm(x, y, y),
    "addmm": lambda x, y: torch.addmm(x, y, y),
    "mm": torch.mm,
    "einsum": lambda x, y: torch.einsum("bij,bkj->bik", x, y),
    "scaled_dot_product_attention": lambda x, y: functional.scaled_dot_product_attention(x, y, y),
    "layer_norm": lambda x, _: functional.layer_norm(x, (8,)),
    "group_norm": lambda x, _: functional.group_norm(x, 4),
    "exp": lambda x, _: x.exp(),
    "log": lambda x, _: x.log(),
    "pow": lambda x, _: x.pow(2),
    "__pow__": lambda x, _: x**3,
    "reciprocal": lambda x, _: x.reciprocal(),
    "rsqrt": lambda x, _: x.rsqrt(),
    "softmax": lambda x, _: functional.softmax(x, dim=-1),
    "log_softmax": lambda x, _: x.log_softmax(-1),
    "sum": lambda x, _: x.sum(-1),
    "prod": lambda x, _: x.prod(-1),
    "cumsum": lambda x, _: x.cumsum(-1),
    "cumprod": lambda x, _: x.cumprod(-1),
    "cat": lambda x, y: torch.cat([x, y]),
    "add": torch.add,
    "mul": lambda x, y: x * y,
    "silu": lambda x, _: functional.silu(x),
    "gelu": lambda x, _: functional.gelu(x),
    "mean": lambda x, _: x.mean(-1),
    "amax": lambda x, _: x.amax(-1),
    "softmax with a type": lambda x, _: x.softmax(-1, dtype=torch.float64),
    "softmax of the module": lambda x, _: torch.nn.Softmax(-1)(x),
}
NEEDS_MATRICES = ("linear", "addmm", "mm")
NEEDS_CUDA = ("scaled_dot_product_attention", "conv2d")  # of which the fake tensors ask CUDA
TYPES = (torch.float16, torch.float32, torch.float64)


def test_every_rule_is_tried() -> None:
    rules = autocast.LOWER_PRECISION | autocast.FLOAT32 | autocast.FLOAT32_RESULT
    assert rules <= CALLS.keys()
    assert len(rules) == sum(
        map(len, (autocast.LOWER_PRECISION, autocast.FLOAT32, autocast.FLOAT32_RESULT))
    )
    assert not rules & autocast.AS_THEY_ARE


def operands(name: str, device: str, dtype: torch.dtype, other: torch.dtype) -> list[torch.Tensor]:
    shape = (8, 8) if name in NEEDS_MATRICES else (2, 8, 8)
    return [torch.empty(shape, device=device, dtype=one) for one in (dtype, other)]


@pytest.fixture
def cuda_autocast() -> Iterator[None]:
    """CUDA's own rules, which are in every build of torch."""
    try:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.float16)
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.skipif(RELEASE < (2, 8), reason="graphs for GPUs need 2.8")
@pytest.mark.usefixtures("cuda_autocast")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in NEEDS_CUDA])
def test_each_function_gives_the_type_that_it_gives_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    for other in (dtype, torch.float32) if dtype != torch.float64 else (dtype,):
        with FakeTensorMode():
            x, y = operands(name, "cuda", dtype, other)
            try:
                expected: Any = CALLS[name](x, y).dtype
            except RuntimeError as exc:
                expected = str(exc).partition(",")[0]
            x, y = operands(name, "cpu", dtype, other)
            with CudaAutocast(torch.float16):
                try:
                    found: Any = CALLS[name](x, y).dtype
                except RuntimeError as exc:
                    found = str(exc).partition(",")[0]
        assert found == expected, (dtype, other)


@pytest.mark.parametrize("name", NEEDS_CUDA)
def test_functions_of_which_no_fake_tensor_knows(name: str) -> None:
    for dtype in (torch.float16, torch.float32):
        x = torch.zeros((2, 8, 8), dtype=dtype)
        with CudaAutocast(torch.bfloat16):
            assert CALLS[name](x, x).dtype == torch.bfloat16


def test_a_function_without_a_rule_is_an_error() -> None:
    points = torch.zeros(2, 3)
    with CudaAutocast(torch.float16), pytest.raises(ExportError, match="cdist"):
        torch.cdist(points, points)


class Rotated(nn.Module):
    """A block with a region that its author keeps out of autocast, as Z-Image's RoPE is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, under_autocast: bool) -> torch.Tensor:
        with CudaAutocast(torch.bfloat16) if under_autocast else nullcontext():
            y = self.linear(x)
            with torch.autocast("cuda", enabled=False):
                z = (y.float() @ y.float().mT).cos()
                w = z + 1
            return self.linear((z @ w).mT @ x)


@pytest.mark.parametrize("under_autocast", [False, True])
def test_a_region_without_autocast_is_part_of_the_graph(under_autocast: bool) -> None:
    block, x = Rotated().eval(), torch.randn(2, 8, 8)
    with torch.no_grad():
        expected = block(x, under_autocast)
        program = torch.export.export(block, (x, under_autocast), strict=False)
        graph = program.graph_module
        assert any("wrap_with_autocast" in str(node.target) for node in graph.graph.nodes)
        inline_disabled_autocast(graph)
        assert not any("wrap_with_autocast" in str(node.target) for node in graph.graph.nodes)
        weights = [value for _, value in block.named_parameters()]
        (found,) = graph(*weights, x, under_autocast)
    assert torch.equal(found, expected)


def test_code_without_autocast_keeps_its_types() -> None:
    x = torch.ones(4, 4)
    with CudaAutocast(torch.bfloat16):
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cuda")


def transformer() -> tuple[BlockFamily, nn.Module, BlockCall]:
    block = BasicTransformerBlock(64, 2, 32, cross_attention_dim=48, activation_fn="geglu").eval()
    call = TransformerFamily().bind(
        block, (torch.randn(2, 20, 64),), {"encoder_hidden_states": torch.randn(2, 17, 48)}
    )
    assert isinstance(call, BlockCall)
    return TransformerFamily(), block, call


def resnet() -> tuple[BlockFamily, nn.Module, BlockCall]:
    block = ResnetBlock2D(in_channels=32, out_channels=64, temb_channels=48).eval()
    call = ResnetFamily().bind(block, (torch.randn(2, 32, 6, 9), torch.randn(2, 48)), {})
    assert isinstance(call, BlockCall)
    return ResnetFamily(), block, call


def exported(
    family: BlockFamily, block: nn.Module, call: BlockCall, dtype: torch.dtype
) -> tuple[bytes, list[torch.Tensor]]:
    """The program of a block under a GPU's autocast, traced on the CPU, and its weights."""
    tree = BlockTree.of(block, family)
    weights = tree.weights()
    assert weights is not None
    autocast = ("cuda", dtype)
    program = export_block(
        tree.copy(), family, tree.names, weights, call, torch.device("cpu"), autocast
    )
    return save_program(program), weights


@pytest.mark.parametrize("make", [transformer, resnet])
@torch.no_grad()
def test_a_block_traced_on_the_cpu_has_the_casts_in_it(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    family, block, call = make()
    saved, weights = exported(family, block, call, torch.bfloat16)
    program = load_program(saved)
    types: dict[str, set[torch.dtype]] = {}
    for node in program.graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            types.setdefault(str(node.target), set()).add(node.meta["val"].dtype)
    assert not any("autocast" in operator for operator in types)
    products = {t for name, of in types.items() if "linear" in name or "conv" in name for t in of}
    assert products == {torch.bfloat16}
    norms = {t for name, of in types.items() if "_norm" in name for t in of}
    assert norms == {torch.float32}
    found = program.graph_module(*weights, *call.tensors)[0]
    expected = family.run(block, call.tensors, dict(call.statics))
    error = (torch.linalg.vector_norm(found - expected) / expected.norm()).item()
    assert 1e-4 < error < 2e-2  # exact would mean that nothing was cast


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("make", [transformer, resnet])
@torch.no_grad()
def test_moved_to_the_gpu_it_computes_as_under_autocast(
    make: Callable[[], Any], kernels: bool
) -> None:
    from onediff_ext.backends.inductor.kernels.rewrite import with_kernels

    torch.manual_seed(0)
    family, block, call = make()
    saved, weights = exported(family, block, call, torch.float16)
    program = load_program(saved, torch.device("cuda"))
    tensors = [tensor.cuda() for tensor in call.tensors]
    graph = with_kernels(program.graph_module) if kernels else program.graph_module
    found = graph(*(weight.cuda() for weight in weights), *tensors)[0]
    with torch.autocast("cuda", dtype=torch.float16):
        expected = family.run(block.cuda(), tensors, dict(call.statics))
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@torch.no_grad()
def test_a_program_traced_on_one_gpu_is_moved_to_another() -> None:
    """The same file serves two GPUs of one kind: its constants and checks name a device."""
    family, block, call = transformer()
    saved, _ = exported(family, block, call, torch.float16)
    on_second = save_program(load_program(saved, torch.device("cuda", 1)))
    for wanted, found in (("cuda:0", 0), ("cuda:1", 1), ("cuda", 1)):
        program = load_program(on_second, torch.device(wanted))
        assert {fake.device for fake in input_fakes(program)} == {torch.device("cuda", found)}
        named = {d for node in program.graph.nodes for d in devices_of(node)}
        assert named <= {torch.device("cuda", found)}


def devices_of(node: torch.fx.Node) -> list[torch.device]:
    return [d for d in (*node.args, *node.kwargs.values()) if isinstance(d, torch.device)]
