"""The transformers (DiT) of Forge and Neo through graphs, on stand-ins of either host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.forge_attention import EXACT
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from onediff_ext.webui.warm_up_jobs import WarmUpJobs
from tests.support.forge_stand_in import FakeProcessing, ForgeStandIn, running
from tests.support.forge_transformers.draws import TRANSFORMERS, Transformer
from tests.support.ldm_stand_in import written_in
from tests.support.strict_recorder import StrictRecorder

SIZES: tuple[dict[str, int], ...] = (
    {},
    {"height": 17, "width": 25},
    {"batch": 3, "tokens": 1},
    {"tokens": 512, "batch": 2},
    {"height": 64, "width": 6, "tokens": 77},
    {"height": 32, "width": 64, "tokens": 256},
)


@pytest.fixture(params=list(TRANSFORMERS))
def transformer(request: pytest.FixtureRequest) -> Transformer:
    return TRANSFORMERS[request.param]


@pytest.fixture
def host(transformer: Transformer) -> Iterator[ForgeStandIn]:
    with running(transformer.host) as stand_in:
        stand_in.load(0, transformer=transformer.make)
        yield stand_in


@pytest.fixture(scope="session")
def options(tmp_path_factory: pytest.TempPathFactory) -> CompileOptions:
    """One store for all tests, so that each kind is built once."""
    store = tmp_path_factory.getbasetemp() / "forge-transformers-store"
    return CompileOptions(backend="eager", build="wait", store=store, workers=1)


@pytest.fixture
def built(host: ForgeStandIn, transformer: Transformer, graphs: GraphsForJobs, job: Any) -> None:
    """Every kind has a graph that was compared with eager."""
    p = job()
    for _ in range(2):
        transformer.draw(host.unet)
    graphs.end(p)
    assert graphs.session.fallbacks() == []
    assert len(graphs.session.kinds) == transformer.kinds
    assert {kind.state.value for kind in graphs.session.kinds} == {"ready"}


@pytest.fixture
def drawn(
    host: ForgeStandIn, transformer: Transformer, graphs: GraphsForJobs, job: Any, built: None
) -> Callable[..., tuple[torch.Tensor, int]]:
    """Draws as a job; gives the result and how many blocks ran as graphs."""

    def draw(**options: Any) -> tuple[torch.Tensor, int]:
        p = job()
        before = sum(kind.calls for kind in graphs.session.kinds)
        result = transformer.draw(host.unet, **options)
        calls = sum(kind.calls for kind in graphs.session.kinds) - before
        graphs.end(p)
        return result, calls

    return draw


def store_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = torch.nn.Parameter(weight.to(dtype), False)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.allclose(one, other, atol=1e-5, rtol=1e-4))


def test_any_size_batch_and_prompt_without_a_further_kind(
    host: ForgeStandIn, transformer: Transformer, graphs: GraphsForJobs, drawn: Any
) -> None:
    for size in SIZES:
        expected = transformer.draw(host.unet, **size)
        found, calls = drawn(**size)
        assert calls == transformer.blocks, size
        assert close(found, expected), size
    assert len(graphs.session.kinds) == transformer.kinds
    assert graphs.session.fallbacks() == []


def test_merged_loras_are_seen_without_a_build(
    host: ForgeStandIn, transformer: Transformer, graphs: GraphsForJobs, drawn: Any
) -> None:
    plain = transformer.draw(host.unet)
    for strength in (0.5, 0.2, 0.0):
        host.merge_lora(strength)
        expected = transformer.draw(host.unet)
        found, calls = drawn()
        assert calls == transformer.blocks
        assert close(found, expected)
        assert close(found, plain) is (strength == 0.0)
    assert len(graphs.session.kinds) == transformer.kinds


def test_a_lora_that_is_applied_at_each_call(
    host: ForgeStandIn, transformer: Transformer, graphs: GraphsForJobs, drawn: Any
) -> None:
    layer = host.unet.get_submodule(transformer.layer)
    addition = torch.full_like(layer.weight, 0.01)
    if host.name == "forge":
        layer.forge_online_loras = {"weight": addition}
    else:
        layer.weight_function = [lambda weight: weight + addition]
    expected = transformer.draw(host.unet)
    found, calls = drawn()
    assert close(found, expected)
    assert calls == transformer.blocks - 1
    assert any("change at each call" in f.reason for f in graphs.session.fallbacks())


def test_checkpoints_of_a_unet_and_of_a_transformer_in_turn(
    host: ForgeStandIn, transformer: Transformer, graphs: GraphsForJobs, drawn: Any, job: Any
) -> None:
    expected, seen = transformer.draw(host.unet), []
    for number in range(3):
        host.load(0)
        unet = host.draw()
        p = job()
        for _ in range(2):
            assert close(host.draw(), unet)
        graphs.end(p)
        seen.append(len(graphs.session.kinds))
        host.load(0, transformer=transformer.make)
        found, calls = drawn()
        assert calls == transformer.blocks, number
        assert close(found, expected)
        seen.append(len(graphs.session.kinds))
    assert len(set(seen)) == 1
    assert graphs.session.fallbacks() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_weights_that_layers_cast_at_each_call(
    host: ForgeStandIn,
    transformer: Transformer,
    graphs: GraphsForJobs,
    job: Any,
    dtype: torch.dtype,
) -> None:
    with torch.inference_mode():
        for module in host.unet.modules():
            if hasattr(module, "parameters_manual_cast"):
                module.parameters_manual_cast = True
        store_weights(host.unet, dtype)
    p = job()
    for _ in range(3):
        found = transformer.draw(host.unet)
    assert graphs.session.fallbacks() == []
    graphs.end(p)
    assert close(found, transformer.draw(host.unet))


@pytest.mark.usefixtures("built")
def test_kinds_are_told_by_what_people_know(
    transformer: Transformer, graphs: GraphsForJobs
) -> None:
    names = {kind.label.split(" ")[0] for kind in graphs.session.kinds}
    assert "Block" not in names
    if transformer.name == "Anima":
        assert names == {"AnimaBlock"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_model_that_computes_in_half_precision(
    host: ForgeStandIn,
    transformer: Transformer,
    graphs: GraphsForJobs,
    job: Any,
    dtype: torch.dtype,
) -> None:
    """Anima keeps its residual stream in float32 then, if it computes in float16."""
    if transformer.name != "Anima":
        pytest.skip("its residual stream has one dtype")
    with torch.inference_mode():
        store_weights(host.unet, dtype)
    p = job()
    for _ in range(3):
        found = transformer.draw(host.unet, dtype=dtype)
    calls = sum(kind.calls for kind in graphs.session.kinds)
    assert graphs.session.fallbacks() == []
    assert calls >= transformer.blocks
    graphs.end(p)
    expected = transformer.draw(host.unet, dtype=dtype)
    assert float((found - expected).abs().max()) < 0.02 * float(expected.abs().max())


def test_an_attention_that_is_not_the_hosts_own(
    host: ForgeStandIn,
    transformer: Transformer,
    graphs: GraphsForJobs,
    drawn: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not transformer.attends_in:
        pytest.skip("its blocks call PyTorch's kernel themselves")
    home = host.classes.modules[transformer.attends_in]
    own = home.attention_function

    def attention_sage(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs) * 0.9

    monkeypatch.setattr(home, "attention_function", attention_sage)
    expected = transformer.draw(host.unet)
    found, calls = drawn()
    assert close(found, expected)
    assert calls == 0
    reasons = {f.reason for f in graphs.session.fallbacks()}
    assert any("attention_sage" in reason for reason in reasons)
    assert any("--disable-sage" in reason for reason in reasons) == (host.name == "neo")


@pytest.mark.parametrize("name", sorted(EXACT))
def test_functions_of_attention_that_the_host_chooses_among(
    host: ForgeStandIn,
    transformer: Transformer,
    graphs: GraphsForJobs,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    if not transformer.attends_in:
        pytest.skip("its blocks call PyTorch's kernel themselves")
    home = host.classes.modules[transformer.attends_in]
    own = home.attention_function

    def call(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    attention = host.classes.modules["backend.attention"]
    function = written_in(call, attention.__name__)
    function.__name__ = name
    for module, variable in (
        (attention, name),
        (attention, "attention_function"),
        (home, "attention_function"),
    ):
        monkeypatch.setattr(module, variable, function, raising=False)
    expected = transformer.draw(host.unet)
    found, calls = request.getfixturevalue("drawn")()
    assert close(found, expected)
    assert calls == transformer.blocks
    assert graphs.session.fallbacks() == []


def test_a_rope_of_another_extension(
    host: ForgeStandIn,
    transformer: Transformer,
    graphs: GraphsForJobs,
    drawn: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anima looks for it in comfy_kitchen at each call; the others have imported it by name."""
    home = host.classes.modules[transformer.module]
    kitchen = getattr(home, "ck", None)
    if kitchen is None:
        pytest.skip("it does not look into a package for it")
    own = kitchen.apply_rope_split_half

    @functools.wraps(own)
    def rope(q: Any, k: Any, table: Any) -> Any:
        q, k = own(q, k, table)
        return q * 2, k

    monkeypatch.setattr(kitchen, "apply_rope_split_half", rope)
    expected = transformer.draw(host.unet)
    found, calls = drawn()
    assert close(found, expected)
    assert calls == 0
    reasons = {f.reason for f in graphs.session.fallbacks()}
    assert "comfy_kitchen's apply_rope_split_half is another extension's" in reasons
    monkeypatch.undo()
    found, calls = drawn()
    assert close(found, transformer.draw(host.unet))
    assert calls == transformer.blocks


def test_a_block_with_further_arguments_has_no_family(
    host: ForgeStandIn, transformer: Transformer, graphs: GraphsForJobs, job: Any
) -> None:
    block = type(host.unet.get_submodule(".".join(transformer.layer.split(".")[:2])))
    own = block.forward

    def forward(self: Any, *given: Any, extra: Any = None, **named: Any) -> Any:
        return own(self, *given, **named)

    block.forward = forward
    expected = transformer.draw(host.unet)
    p = job()
    for _ in range(2):
        assert close(transformer.draw(host.unet), expected)
    graphs.end(p)
    # Flux' blocks have two classes, those of the others have one.
    left = 1 if hasattr(host.unet, "double_blocks") else 0
    assert len(graphs.session.kinds) == left


def test_nothing_is_left_behind(
    host: ForgeStandIn, transformer: Transformer, graphs: GraphsForJobs, built: None, job: Any
) -> None:
    before = host.attributes()
    p = job()
    transformer.draw(host.unet)
    assert host.attributes() != before
    graphs.end(p)
    assert host.attributes() == before


def test_warming_up_makes_everything_ready(
    host: ForgeStandIn,
    transformer: Transformer,
    graphs: GraphsForJobs,
    options: CompileOptions,
    job: Any,
) -> None:
    WarmUpJobs(graphs).run([BatchShape(64, 136), BatchShape(72, 64, 2)], options)
    status = graphs.status()
    assert (status.kinds_ready, status.kinds_failed) == (status.kinds_needed, 0)
    found = list(graphs.session.kinds)
    p = job()
    transformer.draw(host.unet)
    graphs.end(p)
    assert list(graphs.session.kinds) == found


def test_the_forward_is_recorded_and_replayed(
    host: ForgeStandIn, transformer: Transformer, graphs: GraphsForJobs, tmp_path: Path
) -> None:
    recorder, p = StrictRecorder(), FakeProcessing()
    graphs.begin(p, CompileOptions(backend="eager", build="wait", store=tmp_path, workers=1))
    assert graphs.session is not None
    graphs.session.cuda_graphs = CudaGraphCache(recorder)
    graphs.before_sampling(p)
    for seed in range(7):
        transformer.draw(host.unet, seed=seed)
    attachment = next(a for a in graphs.models.attached if a.component.name == "transformer")
    assert attachment.component.captured.reason == ""
    assert recorder.recorded == 1
    found = transformer.draw(host.unet, seed=50, control_model=object())
    with attachment.component.paused():
        expected = transformer.draw(host.unet, seed=50)
    assert close(found, expected)
    assert recorder.recorded == 1
    graphs.end(p)
