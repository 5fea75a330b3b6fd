"""The adapters of Forge and reForge and their blocks, on a stand-in of either host."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.blocks import group_norm_family as torch_families
from onediff_ext.hosts.base import WebUIHost
from onediff_ext.store import CheckpointRecords
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from onediff_ext.webui.warm_up_jobs import WarmUpJobs
from tests.support.forge_stand_in import (
    ADAPTERS,
    FakeProcessing,
    ForgeStandIn,
    SDXLRefiner,
    running,
)
from tests.support.ldm_stand_in import written_in

KINDS_OF_THE_UNET = 3  # ResBlock 16→16 (two blocks), ResBlock 16→32, BasicTransformerBlock


@pytest.fixture
def adapter(host: ForgeStandIn) -> WebUIHost:
    return ADAPTERS[host.name]()


@pytest.fixture
def graphs(adapter: WebUIHost) -> GraphsForJobs:
    return GraphsForJobs(adapter)


@pytest.fixture(scope="session")
def options(tmp_path_factory: pytest.TempPathFactory) -> CompileOptions:
    """One store for all tests, so that each kind is built once."""
    store = tmp_path_factory.getbasetemp() / "forge-store"
    return CompileOptions(backend="eager", build="wait", store=store, workers=1)


@pytest.fixture
def built(host: ForgeStandIn, graphs: GraphsForJobs, job: Any) -> None:
    """Every kind has a graph that was compared with eager."""
    p = job()
    for _ in range(2):
        host.draw()
        host.decode()
    graphs.end(p)
    assert graphs.status().running == "compiled"
    assert graphs.session.fallbacks() == []


@pytest.fixture
def drawn(
    host: ForgeStandIn, graphs: GraphsForJobs, job: Any, built: None
) -> Callable[..., tuple[torch.Tensor, int]]:
    """Draws as a job; gives the result and how many blocks ran as graphs."""

    def draw(**options: Any) -> tuple[torch.Tensor, int]:
        p = job()
        before = sum(kind.calls for kind in graphs.session.kinds)
        result = host.draw(**options)
        calls = sum(kind.calls for kind in graphs.session.kinds) - before
        graphs.end(p)
        return result, calls

    return draw


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.allclose(one, other, atol=1e-5, rtol=1e-4))


SIZES = ({}, {"height": 17, "width": 25}, {"batch": 1}, {"tokens": 154}, {"batch": 3, "height": 6})


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forwards_equal_the_models_own(
    host: ForgeStandIn, graphs: GraphsForJobs, drawn: Any, size: dict[str, int]
) -> None:
    expected = host.draw(**size)
    found, calls = drawn(**size)
    assert calls == 4
    assert close(found, expected)
    assert graphs.session.fallbacks() == []


@pytest.mark.usefixtures("built")
def test_the_vae_equals_its_own(host: ForgeStandIn, graphs: GraphsForJobs, job: Any) -> None:
    expected = host.decode(9, 13)
    p = job()
    assert close(host.decode(9, 13), expected)
    graphs.end(p)


@pytest.mark.usefixtures("built")
def test_the_models_weights_are_inference_tensors(host: ForgeStandIn) -> None:
    assert all(parameter.is_inference() for parameter in host.unet.parameters())
    assert host.unet.training


# ------------------------------------------------------------------ weights


def test_replaced_weights_are_seen_without_a_build(
    host: ForgeStandIn, graphs: GraphsForJobs, drawn: Any
) -> None:
    kinds = len(graphs.session.kinds)
    plain = host.draw()
    for strength in (0.5, 0.2, 0.0):
        host.merge_lora(strength)
        expected = host.draw()
        found, calls = drawn()
        assert calls == 4
        assert close(found, expected)
        assert close(found, plain) is (strength == 0.0)
    assert len(graphs.session.kinds) == kinds


def test_checkpoints_that_replace_each_other(
    host: ForgeStandIn, graphs: GraphsForJobs, drawn: Any
) -> None:
    kinds = len(graphs.session.kinds)
    seen = []
    for seed in (0, 1, 0):
        host.load(seed)
        expected = host.draw()
        seen.append(drawn()[0])
        assert close(seen[-1], expected)
    assert not close(seen[0], seen[1])
    assert len(graphs.session.kinds) == kinds


def test_graphs_are_known_to_belong_to_their_checkpoints(
    host: ForgeStandIn, graphs: GraphsForJobs, drawn: Any
) -> None:
    for seed in (0, 1):
        host.load(seed)
        drawn()
        drawn()
    records = CheckpointRecords(graphs.session.library.folder)
    listed = {listing.record.content_hash: listing for listing in records.list()}
    for seed in (0, 1):
        listing = listed[f"{seed + 1:064x}"]
        assert len(listing.record.kinds) >= KINDS_OF_THE_UNET
        assert not listing.missing


def test_a_model_that_the_host_gives_up_is_not_kept(host: ForgeStandIn, drawn: Any) -> None:
    drawn()
    gone = weakref.ref(host.unet)
    host.load(1)
    gc.collect()
    assert gone() is None


def test_a_model_that_changes_in_the_middle_of_a_job(
    host: ForgeStandIn, graphs: GraphsForJobs, built: None, job: Any
) -> None:
    p = job()
    host.load(3)
    expected = host.draw()
    graphs.before_sampling(p)
    assert close(host.draw(), expected)
    graphs.end(p)
    assert "forward" not in vars(host.unet)


def test_a_lora_that_is_applied_at_each_call_runs_eager_and_says_so(
    host: ForgeStandIn, graphs: GraphsForJobs, drawn: Any
) -> None:
    layer = host.unet.transformer.attn1.to_q
    with torch.inference_mode():
        addition = torch.randn(layer.weight.shape)
    if host.name == "forge":
        layer.forge_online_loras = {"weight": addition}
    else:
        layer.weight_function = [lambda weight: weight + addition]
    expected = host.draw()
    found, calls = drawn()
    assert close(found, expected)
    assert calls == 3
    assert any("change at each call" in f.reason for f in graphs.session.fallbacks())
    if host.name == "forge":
        del layer.forge_online_loras
    else:
        layer.weight_function = []
    assert not close(drawn()[0], expected)
    assert drawn()[1] == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_weights_that_layers_cast_at_each_call(
    host: ForgeStandIn, graphs: GraphsForJobs, job: Any, dtype: torch.dtype
) -> None:
    flag = "ldm_patched_cast_weights" if host.name == "reforge" else "parameters_manual_cast"
    with torch.inference_mode():
        for module in host.unet.modules():
            if hasattr(module, flag):
                setattr(module, flag, True)
                for name, weight in module._parameters.items():
                    if weight is not None:
                        module._parameters[name] = torch.nn.Parameter(weight.to(dtype), False)
    expected = host.draw()
    p = job()
    host.draw()
    assert close(host.draw(), expected)
    assert {k.state.value for k in graphs.session.kinds} == {"ready"}
    assert graphs.session.fallbacks() == []
    graphs.end(p)


def test_what_offloading_leaves_on_layers_is_no_part_of_a_kind(
    host: ForgeStandIn, graphs: GraphsForJobs, drawn: Any
) -> None:
    kinds = len(graphs.session.kinds)
    for module in host.unet.modules():
        if host.name == "forge":
            module.total_mem = module.weight_mem = module.extra_mem = 4711
            module.prev_parameters_manual_cast = False
            module.parameters_manual_cast = True
        elif host.name == "neo":
            module.prev_parameters_manual_cast, module.parameters_manual_cast = False, True
            module.forge_force_cast_weights = module.forge_patched_weights = True
            module.weight_function, module.bias_function = [], []
        else:
            module.prev_ldm_patched_cast_weights = False
            module.ldm_patched_cast_weights = module.ldm_patched_patched_weights = True
            module.weight_function, module.bias_function = [], []
    assert drawn()[1] == 4
    assert len(graphs.session.kinds) == kinds


# ------------------------------------------------------------------ what runs eager


def test_patches_within_the_transformer(
    host: ForgeStandIn, graphs: GraphsForJobs, drawn: Any
) -> None:
    options = {"patches": {"attn2_patch": [lambda n: n * 0.5]}}
    expected = host.draw(**options)
    assert not close(expected, host.draw())
    found, calls = drawn(**options)
    assert close(found, expected)
    assert calls == 3
    assert any("attn2_patch" in f.reason for f in graphs.session.fallbacks())


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside another extension"])
def test_the_hosts_token_merging_has_its_name(
    host: ForgeStandIn, graphs: GraphsForJobs, drawn: Any, others: bool
) -> None:
    def merge(n: torch.Tensor) -> torch.Tensor:
        return n * 0.5

    home = "ldm_patched.contrib.nodes_tomesd" if host.name == "reforge" else "backend.misc.tomesd"
    merge.__module__ = home
    patches = [merge, *([lambda n: n * 0.5] if others else ())]
    options = {"patches": {"attn2_patch": patches}}
    expected = host.draw(**options)
    found, _ = drawn(**options)
    assert close(found, expected)
    who = "another extension" if others else "token merging"
    said = {f.reason for f in graphs.session.fallbacks()}
    assert said == {f"{who} patches the transformer (attn2_patch)"}


def test_patches_between_blocks_keep_graphs(host: ForgeStandIn, drawn: Any) -> None:
    options = {"patches": {"output_block_patch": [lambda h: h * 0.5]}}
    expected = host.draw(**options)
    found, calls = drawn(**options)
    assert close(found, expected)
    assert calls == 4


@pytest.mark.parametrize(("block", "graph_calls"), [(("middle", 0), 3), (("input", 4), 4)])
def test_replaced_attention_concerns_its_own_block_only(
    host: ForgeStandIn, drawn: Any, block: Any, graph_calls: int
) -> None:
    options = {"patches_replace": {"attn2": {block: lambda n: n * 0.1}}}
    expected = host.draw(**options)
    found, calls = drawn(**options)
    assert close(found, expected)
    assert calls == graph_calls


def test_wrapped_group_norms(host: ForgeStandIn, graphs: GraphsForJobs, drawn: Any) -> None:
    if host.name == "reforge":
        pytest.skip("reForge hands no options to residual blocks")
    options = {"group_norm_wrapper": lambda norm, x: norm(x) * 0.5}
    expected = host.draw(**options)
    found, calls = drawn(**options)
    assert close(found, expected)
    assert calls == 1
    assert any("group norm" in f.reason for f in graphs.session.fallbacks())


def test_an_attention_that_is_not_the_hosts_own(
    host: ForgeStandIn, graphs: GraphsForJobs, drawn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = host.classes.modules[host.classes.BasicTransformerBlock.__module__]
    name = "optimized_attention" if host.name == "reforge" else "attention_function"
    own = getattr(home, name)

    def attention_sage(*args: Any) -> Any:
        return own(*args) * 0.9

    monkeypatch.setattr(home, name, attention_sage)
    expected = host.draw()
    found, calls = drawn()
    assert close(found, expected)
    assert calls == 3
    (reason,) = {f.reason for f in graphs.session.fallbacks()}
    assert reason.startswith("attention by attention_sage is not known to be exact")
    flag = {"neo": "with --disable-sage", "reforge": "without --use-sage-attention"}
    assert flag.get(host.name, "exact") in reason


def test_an_attention_of_the_unet_leaves_the_vae_its_graphs(
    host: ForgeStandIn, graphs: GraphsForJobs, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = host.classes.modules[host.classes.BasicTransformerBlock.__module__]
    name = "optimized_attention" if host.name == "reforge" else "attention_function"

    def attention_sage(*args: Any) -> Any:
        raise AssertionError("a VAE has its own")

    monkeypatch.setattr(home, name, attention_sage)
    p = job()
    expected = host.decode()
    graphs.end(p)
    p = job()
    assert close(host.decode(), expected)
    assert not any("attention_sage" in f.reason for f in graphs.session.fallbacks())
    graphs.end(p)


def test_an_attention_of_a_vaes_block(host: ForgeStandIn, graphs: GraphsForJobs, job: Any) -> None:
    """reForge keeps the VAE's attention on each block, where an extension may put its own."""
    if host.name != "reforge":
        pytest.skip("other hosts keep it in a module")
    vae = host.engine.forge_objects.vae.first_stage_model
    blocks = [m for m in vae.modules() if type(m).__name__ == "AttnBlock"]
    home = host.classes.modules[host.classes.AttnBlock.__module__]
    own = written_in(home.attention_function_single_head_spatial, home.__name__)
    vars(home)[own.__name__] = own
    reasons = []
    for function in (own, lambda q, k, v: own(q * 2, k, v)):
        for block in blocks:
            block.optimized_attention = function
        p = job()
        host.decode()
        reasons.append({f.reason for f in graphs.session.fallbacks()})
        graphs.end(p)
    assert blocks
    assert not any("not known to be exact" in reason for reason in reasons[0])
    assert "attention by <lambda> is not known to be exact" in reasons[1]


def test_a_class_that_was_swapped(host: ForgeStandIn, graphs: GraphsForJobs, drawn: Any) -> None:
    layer = host.unet.transformer.attn1.to_q
    own = type(layer)
    doubled = {"forward": lambda self, x: own.forward(self, x) * 2, "__module__": own.__module__}
    layer.__class__ = type("DynamicSwap_Linear", (own,), doubled)
    expected = host.draw()
    found, calls = drawn()
    assert close(found, expected)
    assert calls == 3
    layer.__class__ = own


def test_a_dropout_that_drops(host: ForgeStandIn, graphs: GraphsForJobs, job: Any) -> None:
    host.unet.first.out_layers[2].p = 0.5
    p = job()
    host.draw()
    assert [f.reason for f in graphs.session.fallbacks()] == ["the model is in training mode"]
    graphs.end(p)


def test_weights_elsewhere(host: ForgeStandIn, graphs: GraphsForJobs, drawn: Any) -> None:
    """Forge's offloading: the layer itself fetches them, which a graph would not."""
    layer = host.unet.transformer.ff.out
    weight = layer.weight.clone()
    layer._parameters["weight"] = torch.nn.Parameter(weight.to("meta"), False)
    host.unet.transformer.ff.out.forward = lambda x: torch.nn.functional.linear(
        x, weight, layer.bias
    )
    expected = host.draw()
    found, calls = drawn()
    assert close(found, expected)
    assert calls == 3


@pytest.mark.parametrize("storage", ["nf4", "gguf"])
def test_quantized_models(host: ForgeStandIn, adapter: WebUIHost, storage: str) -> None:
    host.engine.forge_objects.unet.model.storage_dtype = storage
    assert adapter.refusal_reason(None) == f"weights are stored as {storage}"


def test_models_of_other_classes(host: ForgeStandIn, adapter: WebUIHost) -> None:
    other = type("WanModel", (torch.nn.Module,), {})
    host.engine.forge_objects.unet.model.diffusion_model = other()
    reason = "WanModel runs without graphs: its blocks are not known"
    assert adapter.refusal_reason(None) == reason
    adapter.step(BatchShape(64, 64), torch.Generator())  # nothing is known of its arguments


@pytest.mark.parametrize("name", ["forge", "neo"])
def test_online_loras_of_the_whole_model(name: str) -> None:
    with running(name) as host:
        adapter = ADAPTERS[name]()
        assert adapter.refusal_reason(None) is None
        host.engine.forge_objects.unet.online = True
        reason = adapter.refusal_reason(None)
        if name == "forge":
            assert reason == "the LoRA is applied at each call (fp16 LoRA)"
        else:
            assert reason is None  # `test_loras_at_each_call`


# ------------------------------------------------------------------ undoing


def test_nothing_is_left_behind(
    host: ForgeStandIn, graphs: GraphsForJobs, built: None, job: Any
) -> None:
    outside = FakeProcessing()
    before = host.attributes(outside)
    p = job()
    assert "forward" in vars(host.unet)
    host.draw()
    graphs.end(p)
    assert host.attributes(outside) == before
    assert vars(p) == vars(outside)


def test_an_exception_in_the_middle_of_a_job(
    host: ForgeStandIn, graphs: GraphsForJobs, built: None, job: Any
) -> None:
    before = host.attributes()
    p = job()

    def interrupt(n: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        host.draw(patches={"attn2_patch": [interrupt]})
    p.close()  # which the host's API does however a job ends
    assert p.closed
    assert host.attributes() == before


def test_closing_in_the_middle_of_a_job(
    host: ForgeStandIn, graphs: GraphsForJobs, built: None, job: Any
) -> None:
    before = host.attributes()
    job()
    graphs.close()
    assert host.attributes() == before


# ------------------------------------------------------------------ the host itself


def test_before_the_first_checkpoint(
    host: ForgeStandIn, adapter: WebUIHost, graphs: GraphsForJobs, job: Any
) -> None:
    host.start_without_model()
    assert adapter.checkpoint() is None
    assert adapter.models(frozenset()) == []
    assert adapter.refusal_reason(None) is None
    adapter.step(BatchShape(64, 64), torch.Generator())
    adapter.vae_step()
    p = job()
    graphs.end(p)


def test_what_the_host_draws_with(host: ForgeStandIn, adapter: WebUIHost) -> None:
    checkpoint = adapter.checkpoint()
    assert checkpoint is not None
    assert (checkpoint.name, checkpoint.architecture) == ("fake-0", "sd1")
    assert checkpoint.content_hash == f"{1:064x}"
    assert checkpoint.path == "/models/fake-0.safetensors"
    assert [str(identity) for identity, _ in adapter.models(frozenset())] == [
        "unet",
        "vae_encoder",
        "vae_decoder",
    ]
    host.load(1, SDXLRefiner())
    assert adapter.checkpoint().architecture == "sdxl-refiner"


def test_ignored_components(host: ForgeStandIn, adapter: WebUIHost) -> None:
    control = torch.nn.Linear(1, 1)
    host.engine.forge_objects.unet.controls = [
        SimpleNamespace(control_model=control),
        SimpleNamespace(t2i_model=control),
    ]
    ignores = frozenset({"vae", "vae_encoder", "vae_decoder"})
    assert [str(identity) for identity, _ in adapter.models(ignores)] == ["unet", "controlnet"]
    assert [str(identity) for identity, _ in adapter.models(ignores | {"controlnet"})] == ["unet"]


def test_norms_outside_of_blocks_are_kinds_on_a_gpu(
    host: ForgeStandIn, graphs: GraphsForJobs, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_families, "small_blocks_pay", lambda: True)
    expected, picture = host.draw(), host.decode()
    p = job()
    for _ in range(2):
        assert close(host.draw(), expected)
        assert close(host.decode(), picture)
    graphs.end(p)
    kinds = {kind.label: kind for kind in graphs.session.kinds}
    assert kinds["GroupNorm 16"].calls > 0  # of the host's class
    assert kinds["GroupNorm 8"].calls > 0  # torch's
    assert graphs.session.fallbacks() == []


def test_warming_up_makes_everything_ready(
    host: ForgeStandIn, graphs: GraphsForJobs, options: CompileOptions
) -> None:
    before = host.attributes()
    random = torch.get_rng_state()
    WarmUpJobs(graphs).run([BatchShape(64, 136), BatchShape(72, 64, 2)], options)
    assert host.attributes() == before
    assert torch.equal(torch.get_rng_state(), random)
    status = graphs.status()
    assert (status.kinds_ready, status.kinds_failed) == (status.kinds_needed, 0)
    assert status.kinds_needed > KINDS_OF_THE_UNET


def test_a_step_is_the_unets_alone(host: ForgeStandIn, adapter: WebUIHost) -> None:
    """Or a warm-up would time the VAE too, and move it to the GPU and back at each step."""
    ran: list[str] = []
    parts = {"unet": host.unet, "vae": host.engine.forge_objects.vae.first_stage_model.decoder}
    for name, module in parts.items():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    adapter.step(BatchShape(64, 64), torch.Generator())
    assert ran == ["unet"]
    adapter.vae_step()
    assert ran == ["unet", "vae"]


def test_the_hosts_queue_is_waited_for(host: ForgeStandIn, adapter: WebUIHost) -> None:
    lock = sys.modules["modules.call_queue"].queue_lock
    seen: list[bool] = []
    adapter.run_exclusively(lambda: seen.append(lock.locked()))
    assert seen == [True]
    assert not lock.locked()


def test_convolutions_that_are_made_to_tile(host: ForgeStandIn, drawn: Any) -> None:
    """Switch tiling on every convolution between jobs, like reForge and some extensions."""
    convolutions = [m for m in host.unet.modules() if isinstance(m, torch.nn.Conv2d)]
    plain = host.draw()
    for padding in ("circular", "zeros", "circular"):
        for convolution in convolutions:
            convolution.padding_mode = padding
        expected = host.draw()
        assert close(expected, plain) is (padding == "zeros")
        for _ in range(2):
            assert close(drawn()[0], expected)
