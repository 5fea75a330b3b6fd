"""LoRAs that Neo and reForge add to weights at each call: through graphs, and in CUDA graphs.

A recorder for CPUs records what a GPU would. `test_streamed_weights_gpu` has the same on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.blocks.weight_functions import FrozenFunctions, LayerFunctions
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.running.streamed_weights import NO_ROOM
from onediff_ext.hosts.forge.packages import REFORGE
from onediff_ext.hosts.forge_weight_functions import LowVramPatches
from onediff_ext.hosts.neo.package import NEO
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support.forge_lora_stand_in import HOMES, MERGES, StreamedLora
from tests.support.forge_stand_in import ADAPTERS, FakeProcessing, ForgeStandIn, running
from tests.support.strict_recorder import StrictRecorder

# In each kind of block, in layers of the prompt, and between blocks.
LAYERS = (
    *("first.in_layers.2", "second.emb_layers.1", "transformer.attn1.to_q"),
    *("transformer.attn2.to_k", "transformer.attn2.to_v", "transformer.ff.out", "entry"),
)


@pytest.fixture(params=sorted(HOMES))
def host(request: pytest.FixtureRequest) -> Iterator[ForgeStandIn]:
    with running(request.param) as stand_in:
        yield stand_in


@pytest.fixture
def lora(host: ForgeStandIn) -> StreamedLora:
    made = StreamedLora(host.name)
    for name in LAYERS:
        made.add(host.unet, name)
    return made


@pytest.fixture
def job(
    host: ForgeStandIn, graphs: GraphsForJobs, recorder: StrictRecorder, tmp_path: Path
) -> Iterator[FakeProcessing]:
    p = FakeProcessing()
    graphs.begin(p, CompileOptions(backend="eager", build="wait", store=tmp_path, workers=1))
    assert graphs.session is not None
    graphs.session.cuda_graphs = CudaGraphCache(recorder)
    graphs.before_sampling(p)
    yield p
    graphs.end(p)


def step(host: ForgeStandIn, seed: int = 0) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    x, context = torch.randn(2, 4, 8, 8, generator=noise), torch.randn(2, 77, 24, generator=noise)
    with torch.inference_mode():
        result: torch.Tensor = host.unet(
            x, torch.full((2,), 300.0 + seed), context=context, transformer_options={}
        )
        return result.clone()


@pytest.fixture
def check(host: ForgeStandIn, graphs: GraphsForJobs, job: Any) -> Callable[[], list[str]]:
    """Settles, compares with the host's own, and returns the eager reasons of blocks."""

    def settled() -> list[str]:
        for seed in range(7):
            step(host, seed)
        unet = component(graphs)
        for seed in range(20, 23):
            found = step(host, seed)
            with unet.paused():
                expected = step(host, seed)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        return [runner.eager_reason for runner in unet.runners if runner.eager_reason]

    return settled


def begin_again(graphs: GraphsForJobs, job: FakeProcessing) -> None:
    """The next picture: a refusal of a model is kept for one."""
    assert graphs.session is not None
    options = graphs.session.options
    graphs.end(job)
    graphs.begin(job, options)
    graphs.before_sampling(job)


def component(graphs: GraphsForJobs) -> Any:
    return next(a.component for a in graphs.models.attached if a.component.name == "unet")


def test_blocks_run_through_graphs_and_the_forward_is_recorded(
    host: ForgeStandIn,
    graphs: GraphsForJobs,
    lora: StreamedLora,
    recorder: StrictRecorder,
    check: Callable[[], list[str]],
) -> None:
    before = {name: weight.clone() for name, weight in host.unet.named_parameters()}
    plain = step(host)
    lora.switch(host.unet, on=True)
    assert not torch.allclose(step(host), plain, atol=1e-2)
    assert check() == []
    assert recorder.recorded == 1
    assert component(graphs).captured.reason == ""
    assert all(torch.equal(before[n], weight) for n, weight in host.unet.named_parameters())
    lora.switch(host.unet, on=False)
    assert check() == []
    torch.testing.assert_close(step(host), plain, rtol=1e-4, atol=1e-5)
    assert graphs.session is not None
    assert {kind.state.value for kind in graphs.session.kinds} == {"ready"}


@pytest.mark.usefixtures("job")
def test_whatever_changes_of_a_lora_is_seen(
    host: ForgeStandIn, graphs: GraphsForJobs, lora: StreamedLora, recorder: StrictRecorder
) -> None:
    """Each change is one that a CUDA graph has frozen, or that keys and values were made with."""

    def assert_seen(change: Callable[[], object]) -> None:
        for seed in range(7):
            step(host, seed)
        recorded, before = recorder.recorded, step(host)
        change()
        found = step(host)
        with component(graphs).paused():
            expected = step(host)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found, before, atol=1e-4)
        assert recorded

    lora.switch(host.unet, on=True)
    for key in ("transformer.attn2.to_k.weight", "transformer.ff.out.weight", "entry.weight"):
        patches = lora.patches[key]
        _, adapter, *rest = patches[0]
        up, down, _, *others = adapter.weights
        layer = host.unet.get_submodule(key.removesuffix(".weight"))
        functions = layer.weight_function
        assert_seen(lambda patches=patches, a=adapter, r=rest: patches.append((0.5, a, *r)))
        assert_seen(lambda patches=patches, a=adapter, r=rest: patches.__setitem__(0, (2.0, a, *r)))
        assert_seen(lambda a=adapter, u=up, d=down, o=others: _set(a, (u, d, 5.0, *o)))
        assert_seen(lambda a=adapter, u=up, d=down, o=others: _set(a, (u * 3, d, 5.0, *o)))
        assert_seen(lambda u=adapter.weights[0]: _scale(u, 0.4))
        assert_seen(lambda p=patches, a=adapter, r=rest: p.append((1.0, a, 0.5, *r[1:])))
        assert_seen(lambda layer=layer: setattr(layer, "weight_function", []))
        assert_seen(lambda layer=layer, f=functions: setattr(layer, "weight_function", f))
        assert_seen(lambda layer=layer, f=functions: layer.weight_function.append(f[0]))


def _set(adapter: Any, weights: tuple[Any, ...]) -> None:
    adapter.weights = weights


@torch.inference_mode()
def _scale(tensor: torch.Tensor, factor: float) -> None:
    tensor.mul_(factor)


def test_functions_of_others_keep_their_block_eager(
    host: ForgeStandIn,
    graphs: GraphsForJobs,
    lora: StreamedLora,
    recorder: StrictRecorder,
    job: FakeProcessing,
    check: Callable[[], list[str]],
) -> None:
    lora.switch(host.unet, on=True)
    layer = host.unet.get_submodule("transformer.ff.out")
    known = list(layer.weight_function)
    layer.weight_function.append(lambda weight: weight * 1.5)
    (reason,) = check()
    assert "change at each call" in reason
    assert recorder.recorded == 0
    assert component(graphs).captured.reason == "a layer changes its weights at each call"
    layer.weight_function = known
    assert check() == [reason]  # until the next picture: a refusal is kept that long
    begin_again(graphs, job)
    assert check() == []


def test_a_function_that_another_takes_the_place_of_while_it_runs(
    host: ForgeStandIn, lora: StreamedLora, check: Callable[[], list[str]]
) -> None:
    lora.switch(host.unet, on=True)
    assert check() == []
    layer = host.unet.get_submodule("first.in_layers.2")
    layer.weight_function = [lambda weight: weight * 1.5]
    (reason,) = check()
    assert reason == "weights change at each call"


def test_a_weight_that_the_layer_casts_first_keeps_its_block_eager(
    host: ForgeStandIn, lora: StreamedLora, check: Callable[[], list[str]]
) -> None:
    """The host applies the LoRA behind the cast; a graph's cast would come after it."""
    layer = host.unet.get_submodule("transformer.ff.out")
    setattr(layer, CASTS[host.name], True)
    with torch.inference_mode():
        layer.weight = torch.nn.Parameter(layer.weight.to(torch.float16), requires_grad=False)
    lora.switch(host.unet, on=True)
    assert check() == ["weights change at each call"]


CASTS = {"neo": "parameters_manual_cast", "reforge": "ldm_patched_cast_weights"}


def test_a_patched_class_of_the_functions_is_not_recorded(
    host: ForgeStandIn,
    lora: StreamedLora,
    recorder: StrictRecorder,
    check: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora.switch(host.unet, on=True)
    assert check() == []
    assert recorder.recorded == 1
    cls = type(host.unet.get_submodule("entry").weight_function[0])
    own = cls.__call__
    monkeypatch.setattr(cls, "__call__", lambda self, weight: own(self, weight) * 1.5)
    check()
    assert recorder.recorded == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_replaced_helper_of_the_functions_is_not_recorded(
    host: ForgeStandIn,
    lora: StreamedLora,
    recorder: StrictRecorder,
    check: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    lora.switch(host.unet, on=True)
    if when == "after":
        check()
        assert recorder.recorded == 1
    recorded = recorder.recorded
    home, name = MERGES[host.name]
    own = getattr(sys.modules[home], name)
    monkeypatch.setattr(sys.modules[home], name, lambda *given: own(*given) * 1.5)
    assert check() == []
    assert recorder.recorded == recorded


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_lora_of_another_floating_dtype_is_recorded(
    host: ForgeStandIn,
    lora: StreamedLora,
    recorder: StrictRecorder,
    check: Callable[[], list[str]],
    dtype: torch.dtype,
) -> None:
    """Its copies are converted on the GPU."""
    convert(lora, dtype)
    lora.switch(host.unet, on=True)
    assert check() == []
    assert recorder.recorded == 1
    with torch.inference_mode():
        for tensor in lora.tensors():
            tensor.mul_(0.5)
    assert check() == []
    assert recorder.recorded == 1


def test_a_lora_of_whole_numbers_is_not_recorded_and_costs_nothing_afterwards(
    host: ForgeStandIn,
    graphs: GraphsForJobs,
    lora: StreamedLora,
    recorder: StrictRecorder,
    job: FakeProcessing,
    check: Callable[[], list[str]],
) -> None:
    """It would be converted in main memory, once."""
    convert(lora, torch.int32)
    lora.switch(host.unet, on=True)
    assert check() == []
    assert recorder.recorded == 0
    assert component(graphs).captured.reason == "a layer changes its weights at each call"
    lora.switch(host.unet, on=False)
    begin_again(graphs, job)
    assert check() == []
    assert recorder.recorded == 1


def test_where_memory_runs_out_in_a_function_the_layers_do_it(
    host: ForgeStandIn,
    graphs: GraphsForJobs,
    lora: StreamedLora,
    check: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hosts write such an error to their log, and go on with the weight as it is."""
    lora.switch(host.unet, on=True)
    assert check() == []
    component(graphs).captured.active = False
    cls, full = type(lora.patches["entry.weight"][0][1]), [False]
    own = cls.calculate

    def calculate(self: Any, weight: torch.Tensor, strength: float) -> torch.Tensor:
        try:
            if full[0]:
                torch.empty(2**60)
        except RuntimeError:
            return torch.zeros_like(weight)
        made: torch.Tensor = own(self, weight, strength)
        return made

    monkeypatch.setattr(cls, "calculate", calculate)
    apply = LayerFunctions.apply

    def with_copies_of_a_whole_block(self: LayerFunctions, weight: torch.Tensor) -> torch.Tensor:
        full[0] = True
        try:
            return apply(self, weight)
        finally:
            full[0] = False

    monkeypatch.setattr(LayerFunctions, "apply", with_copies_of_a_whole_block)
    assert set(check()) == {NO_ROOM}


def test_a_snapshot_with_unknown_functions_holds(host: ForgeStandIn, lora: StreamedLora) -> None:
    """Otherwise it would be made at each look."""
    for added in (None, object()):
        function_with(host, added)
        frozen = FrozenFunctions(list(host.unet.modules()), [rule(host)])
        assert frozen.is_known is (added is None)
        assert frozen.hold()
    lora.switch(host.unet, on=True)
    assert not frozen.hold()


def test_new_objects_of_the_same_lora_are_the_same(host: ForgeStandIn, lora: StreamedLora) -> None:
    """A host creates new objects each time it loads a model."""
    lora.switch(host.unet, on=True)
    frozen = FrozenFunctions(list(host.unet.modules()), [rule(host)])
    lora.switch(host.unet, on=True)
    assert frozen.hold()


def function_with(host: ForgeStandIn, added: Any, part: Any = None, applied: Any = None) -> Any:
    lora = StreamedLora(host.name)
    lora.add(host.unet, "entry")
    strength, adapter, *_ = lora.patches["entry.weight"][0]
    patch = (strength, adapter if added is None else added, 1.0, part, applied)
    lora.patches["entry.weight"] = [patch]
    lora.switch(host.unet, on=True)
    return host.unet.get_submodule("entry").weight_function[0]


def rule(host: ForgeStandIn) -> LowVramPatches:
    (found,) = {"neo": NEO, "reforge": REFORGE}[host.name].weight_functions
    return found


def test_what_a_cuda_graph_may_contain(host: ForgeStandIn) -> None:
    known = rule(host)
    matrices = function_with(host, None)
    state = known.state(matrices)
    assert state is not None
    up, down, *_ = matrices.patches["entry.weight"][0][1].weights
    assert list(map(id, state.tensors)) == [id(up), id(down)]
    in_part = known.state(function_with(host, None, part=[0, 2, 4]))
    assert in_part is not None
    assert in_part.values != state.values
    difference = torch.ones(16, 4, 3, 3)
    for added in ((difference,), ("diff", (difference,))):
        found = known.state(function_with(host, added))
        assert found is not None
        assert found.objects[-1] is difference


def test_what_no_cuda_graph_may_contain(host: ForgeStandIn) -> None:
    known = rule(host)
    assert known.state(function_with(host, None, applied=lambda weight: weight)) is None
    difference = torch.ones(16, 4, 3, 3)
    for added in (("set", (difference,)), ("diff", (difference, {"pad_weight": True})), object()):
        assert known.state(function_with(host, added)) is None
    function = function_with(host, None)
    adapter = function.patches["entry.weight"][0][1]
    up, down, alpha, *_ = adapter.weights
    for weights in ((up, down, alpha, None, up, None), (up, down, alpha, None, None, (1,)), (up,)):
        adapter.weights = weights  # DoRA, another shape, another version's form
        assert known.state(function) is None
    function.patches.clear()
    assert known.state(function) is None
    assert not known.is_known(lambda weight: weight)


def test_names_are_those_of_the_hosts() -> None:
    """The stand-in has the homes of the real classes, which were read in the hosts' sources."""
    for name, package in (("neo", NEO), ("reforge", REFORGE)):
        (found,) = package.weight_functions
        patch, matrices = HOMES[name]
        assert found.patch == f"{patch}.LowVramPatch"
        assert found.lora == f"{matrices}.LoRAAdapter"
        home, merge = MERGES[name]
        assert merge in found.helpers[home]


def test_graphs_for_jobs_knows_them(host: ForgeStandIn, lora: StreamedLora) -> None:
    lora.switch(host.unet, on=True)
    found = list(rule(host).tensors(host.unet))
    assert {id(t) for t in found} == {id(t) for t in lora.tensors()}
    assert ADAPTERS[host.name]().weight_functions == (rule(host),)


def convert(lora: StreamedLora, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        for tensor in lora.tensors():
            tensor.data = (tensor * 4).to(dtype)
