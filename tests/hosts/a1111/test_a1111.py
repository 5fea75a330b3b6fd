"""A1111's adapter and the graphs of a job, on a stand-in of the host."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.core.options import CompileOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.blocks import group_norm_family as torch_families
from onediff_ext.engine.running.block_runner import BlockRunner
from onediff_ext.hosts.a1111.host import A1111Host
from onediff_ext.hosts.base import HostCheckpoint
from onediff_ext.session.model_component import Component
from onediff_ext.session.warm_up import WarmUp
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from onediff_ext.webui.warm_up_jobs import WarmUpJobs
from tests.support import ldm_stand_in
from tests.support.a1111_stand_in import (
    A1111StandIn,
    FakeModel,
    FakeProcessing,
    a1111,
    conditional,
)
from tests.support.held_builds import builds_on_hold
from tests.support.ldm_stand_in import written_in
from tests.support.session_fixtures import InstantWorker


@pytest.fixture
def host() -> Iterator[A1111StandIn]:
    with a1111() as stand_in:
        yield stand_in


@pytest.fixture
def graphs(host: A1111StandIn) -> GraphsForJobs:
    return GraphsForJobs(A1111Host())


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> CompileOptions:
    """One store for all tests: what one has built the next one loads."""
    store = tmp_path_factory.mktemp("store")
    return CompileOptions(backend="eager", build="wait", store=store, workers=1)


@pytest.fixture
def job(graphs: GraphsForJobs, options: CompileOptions) -> Callable[..., FakeProcessing]:
    """A job that has come as far as sampling."""

    def start(**changes: Any) -> FakeProcessing:
        p = FakeProcessing()
        graphs.begin(p, options, **changes)
        graphs.before_sampling(p)
        return p

    return start


@pytest.fixture
def built(host: A1111StandIn, graphs: GraphsForJobs, job: Any) -> None:
    """Every kind has a graph that was compared with eager."""
    p = job()
    for _ in range(2):
        host.unet()
        host.decode()
    graphs.end(p)
    assert graphs.status().running == "compiled", graphs.status()


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.allclose(one, other, atol=1e-5, rtol=1e-4))


SIZES = ({}, {"height": 17, "width": 25}, {"batch": 1}, {"tokens": 154}, {"batch": 3, "height": 6})


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forwards_equal_the_models_own(
    host: A1111StandIn, graphs: GraphsForJobs, job: Any, size: dict[str, int]
) -> None:
    expected = host.unet(**size)
    p = job()
    before = sum(kind.calls for kind in graphs.session.kinds)
    found = host.unet(**size)
    assert sum(kind.calls for kind in graphs.session.kinds) == before + 4
    graphs.end(p)
    assert close(found, expected)
    assert graphs.session.fallbacks() == []


@pytest.mark.usefixtures("built")
def test_the_vae_equals_its_own(host: A1111StandIn, graphs: GraphsForJobs, job: Any) -> None:
    expected = host.decode(9, 13)
    p = job()
    assert close(host.decode(9, 13), expected)
    graphs.end(p)


@pytest.mark.usefixtures("built")
def test_one_graph_serves_blocks_that_differ_in_the_hosts_own_names(
    graphs: GraphsForJobs,
) -> None:
    labels = [kind.label for kind in graphs.session.kinds]
    assert labels.count("ResBlock 16→16") == 1
    kind = next(kind for kind in graphs.session.kinds if kind.label == "ResBlock 16→16")
    assert len(kind.blocks) == 2


def test_norms_outside_of_blocks_are_kinds_on_a_gpu(
    host: A1111StandIn, graphs: GraphsForJobs, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_families, "small_blocks_pay", lambda: True)
    expected, picture = host.unet(), host.decode()
    p = job()
    for _ in range(2):
        assert close(host.unet(), expected)
        assert close(host.decode(), picture)
    graphs.end(p)
    kinds = {kind.label: kind for kind in graphs.session.kinds}
    assert kinds["GroupNorm32 16"].calls > 0
    assert kinds["GroupNorm 8"].calls > 0
    assert graphs.session.fallbacks() == []


def test_ignored_components_stay_eager(host: A1111StandIn, graphs: GraphsForJobs, job: Any) -> None:
    p = job(ignores=frozenset({"vae", "vae_encoder", "vae_decoder"}))
    host.unet()
    host.decode()
    assert {kind.label for kind in graphs.session.kinds}.isdisjoint({"AttnBlock 16"})
    assert "forward" not in vars(host.model.first_stage_model.decoder)
    graphs.end(p)


# ------------------------------------------------------------------ weights


@pytest.mark.usefixtures("built")
def test_a_pending_lora_is_merged_before_graphs_run(
    host: A1111StandIn, graphs: GraphsForJobs, job: Any
) -> None:
    expected = {}
    for strength in (0.0, 0.2, 0.4):
        host.lora.strength = strength
        expected[strength] = host.unet()
    assert not close(expected[0.2], expected[0.4])
    kinds = len(graphs.session.kinds)
    p = job()
    for strength in (0.4, 0.2, 0.0, 0.4):
        host.lora.strength = strength
        assert close(host.unet(), expected[strength])
    graphs.end(p)
    host.lora.strength = 0.0
    assert close(host.unet(), expected[0.0])
    assert len(graphs.session.kinds) == kinds


def test_a_lora_that_is_pending_while_kinds_are_built(
    host: A1111StandIn, graphs: GraphsForJobs, job: Any
) -> None:
    host.lora.strength = 0.3
    reference = A1111StandIn(host.lora)  # the same weights in another model
    expected = reference.unet()
    p = job()
    for _ in range(3):
        assert close(host.unet(), expected)
    graphs.end(p)
    assert close(host.unet(), expected)


@pytest.mark.usefixtures("built")
def test_checkpoints_in_one_model_and_in_two(
    host: A1111StandIn, graphs: GraphsForJobs, job: Any
) -> None:
    first, other = host.model, FakeModel(seed=5)
    kinds = len(graphs.session.kinds)
    host.load_weights(3)
    expected_first = host.unet()
    host.checkpoint(other)
    expected_other = host.unet()
    for model, expected in ((first, expected_first), (other, expected_other)) * 2:
        host.checkpoint(model)
        p = job()
        assert close(host.unet(), expected)
        graphs.end(p)
    assert len(graphs.session.kinds) == kinds


@pytest.mark.usefixtures("built")
def test_a_refiner_that_changes_the_model_mid_way(
    host: A1111StandIn, graphs: GraphsForJobs, job: Any
) -> None:
    first, refiner = host.model, FakeModel(seed=6)
    expected = FakeModel(seed=6)
    host.checkpoint(expected)
    wanted = host.unet()
    host.checkpoint(first)
    p = job()
    host.unet()
    host.checkpoint(refiner)
    graphs.before_step()
    assert "forward" not in vars(first.model.diffusion_model)
    assert "forward" in vars(refiner.model.diffusion_model)
    assert close(host.unet(), wanted)
    graphs.end(p)
    assert "forward" not in vars(refiner.model.diffusion_model)


def test_a_model_that_the_host_gives_up_is_let_go(
    host: A1111StandIn, graphs: GraphsForJobs, job: Any
) -> None:
    gone = host.model
    p = job()
    host.unet()
    graphs.end(p)
    assert graphs.models.suspended
    host.checkpoint(FakeModel(seed=2))
    gone.to("meta")
    graphs.model_loaded()
    assert not graphs.models.suspended


# ------------------------------------------------------------------ undoing


def test_every_attribute_is_as_it_was(
    host: A1111StandIn, graphs: GraphsForJobs, options: CompileOptions
) -> None:
    p = FakeProcessing()
    before = host.attributes(p)
    for _ in range(2):
        graphs.begin(p, options)
        graphs.before_sampling(p)
        graphs.before_sampling(p)  # a hires pass
        assert host.attributes(p) != before
        host.unet()
        host.decode()
        graphs.end(p)
        graphs.end(p)
        assert host.attributes(p) == before


def test_a_job_that_raises_is_ended_by_its_close(
    host: A1111StandIn, graphs: GraphsForJobs, options: CompileOptions
) -> None:
    p = FakeProcessing()
    before = host.attributes(p)

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    graphs.begin(p, options)
    graphs.before_sampling(p)
    handle = host.model.model.diffusion_model.out.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        host.unet()
    handle.remove()
    p.close()
    assert p.closed
    p.closed = False
    assert host.attributes(p) == before


def test_a_job_that_vanishes_without_close(
    host: A1111StandIn, graphs: GraphsForJobs, job: Any
) -> None:
    before = host.attributes()
    p = job()
    del p
    gc.collect()
    later = job()
    graphs.end(later)
    assert host.attributes() == before


def test_a_job_within_a_job(
    host: A1111StandIn, graphs: GraphsForJobs, options: CompileOptions, job: Any
) -> None:
    before = host.attributes()
    outer = job()
    inner = FakeProcessing()
    graphs.begin(inner, None)  # a face restorer that draws without graphs
    graphs.before_sampling(inner)
    assert host.attributes() == before
    assert graphs.status().running == "off"
    graphs.end(inner)
    graphs.before_sampling(outer)
    assert "forward" in vars(host.model.model.diffusion_model)
    graphs.end(outer)
    assert host.attributes() == before


def test_close_undoes_running_jobs(host: A1111StandIn, graphs: GraphsForJobs, job: Any) -> None:
    before = host.attributes()
    p = job()
    graphs.close()
    assert host.attributes() == before
    assert "close" not in vars(p)


def test_runners_outlive_a_job(host: A1111StandIn, graphs: GraphsForJobs, job: Any) -> None:
    block = host.model.model.diffusion_model.first
    p = job()
    runner = vars(block)["forward"]
    graphs.end(p)
    p = job()
    assert vars(block)["forward"] is runner
    graphs.end(p)


def unet_of(graphs: GraphsForJobs) -> Component:
    return next(a.component for a in graphs.models.attached if a.component.name == "unet")


def test_a_controlnet_that_takes_the_unet_over_before_sampling(
    host: A1111StandIn, graphs: GraphsForJobs, options: CompileOptions
) -> None:
    """It calls the UNet's blocks from a forward of its own; these have graphs all the same."""
    unet = host.model.model.diffusion_model
    own, plain = unet.forward, host.unet()
    runners = []
    for strength in (2, 3):
        p = FakeProcessing()
        graphs.begin(p, options)
        host.control(unet, strength)  # in `process`
        graphs.before_sampling(p)
        assert close(host.unet(), strength * plain)
        assert graphs.status().line() == "compiled"
        component = unet_of(graphs)
        assert component.captured is not None
        assert component.captured.reason == "another extension runs the UNetModel itself"
        runners.append(component.runners[0])
        graphs.end(p)
        host.restore(unet)
        assert unet.forward == own
    assert runners[0] is runners[1]
    p = FakeProcessing()
    graphs.begin(p, options)
    graphs.before_sampling(p)
    assert close(host.unet(), plain)
    assert unet_of(graphs).foreign is None
    graphs.end(p)
    del unet.forward  # which the extension leaves there


@pytest.mark.usefixtures("built")
def test_what_runs_beside_the_unet_has_graphs_for_one_job(
    host: A1111StandIn, graphs: GraphsForJobs, options: CompileOptions
) -> None:
    unet, network = host.model.model.diffusion_model, ldm_stand_in.UNetModel()
    network.eval().requires_grad_(False)
    needed = graphs.status().kinds_needed
    for ignored in (False, True):
        p = FakeProcessing()
        graphs.begin(p, options, frozenset({"controlnet"} if ignored else ()))
        host.control(unet, 2, network)
        graphs.before_sampling(p)
        forwards = [vars(module).get("forward") for module in network.modules()]
        assert any(isinstance(forward, BlockRunner) for forward in forwards) is not ignored
        names = [attached.component.name for attached in graphs.models.attached]
        assert ("controlnet" in names) is not ignored
        graphs.end(p)
        host.restore(unet)
        assert not any("forward" in vars(module) for module in network.modules())
    assert graphs.status().kinds_needed == needed
    kept = weakref.ref(network)
    del network, forwards
    gc.collect()
    assert kept() is None
    del unet.forward


# ------------------------------------------------------------------ refusals


def _set(module: str, name: str, value: object) -> None:
    setattr(sys.modules[module], name, value)


REFUSED: dict[str, Callable[[A1111StandIn], None]] = {
    "fp8": lambda host: _set("modules.devices", "fp8", True),
    "upcast": lambda host: _set("modules.devices", "unet_needs_upcast", True),
    "old method": lambda host: setattr(sys.modules["modules.shared"].opts, "lora_functional", True),
    "hypernetwork": lambda host: _set("modules.shared", "loaded_hypernetworks", [object()]),
    "TensorRT": lambda host: _set(
        "modules.sd_unet",
        "current_unet",
        SimpleNamespace(option=SimpleNamespace(label="TensorRT")),
    ),
}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("reason", REFUSED)
def test_refused_jobs_are_eager_and_say_so(
    host: A1111StandIn, graphs: GraphsForJobs, job: Any, reason: str
) -> None:
    REFUSED[reason](host)
    before = host.attributes()
    p = job()
    assert host.attributes() == before
    status = graphs.status()
    assert status.running == "eager"
    assert reason in status.line()
    graphs.end(p)


@pytest.mark.usefixtures("built")
def test_layers_patched_by_somebody_unknown(
    host: A1111StandIn,
    graphs: GraphsForJobs,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lycoris_forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.T * 2

    monkeypatch.setattr(nn.Linear, "forward", lycoris_forward)
    p = job()
    assert "Linear is patched by" in graphs.status().line()
    graphs.end(p)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", ["BasicTransformerBlock._forward", "GEGLU.forward"])
def test_blocks_patched_by_their_class(
    host: A1111StandIn,
    graphs: GraphsForJobs,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Also when sampling has begun, and again without it: what was traced knows of no patch."""
    class_name, method = name.split(".")
    cls = getattr(sys.modules["ldm.modules.attention"], class_name)
    own = getattr(cls, method)

    def doubled(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = 2 * own(*args, **kwargs)
        return result

    plain = host.unet()
    p = job()
    with monkeypatch.context() as patch:
        patch.setattr(cls, method, written_in(doubled, "another_extension"))
        graphs.before_step()
        changed = host.unet()
        graphs.end(p)
        assert close(changed, host.unet())
        assert not close(changed, plain)
        assert f"{class_name} is patched by another_extension" in graphs.status().line()
    p = job()
    assert close(host.unet(), plain)
    assert graphs.status().running == "compiled", graphs.status()
    graphs.end(p)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("patcher", ["modules.sd_hijack_unet", "another_extension"])
def test_what_a1111_patches_where_there_is_a_gpu(
    host: A1111StandIn,
    graphs: GraphsForJobs,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
    patcher: str,
) -> None:
    """Casts for --upcast-sampling, which are in place without it too and do nothing then."""
    plain = host.unet()
    devices = sys.modules["modules.devices"]
    for place, name in (
        ("ldm.modules.attention", "GEGLU"),
        ("ldm.modules.diffusionmodules.util", "GroupNorm32"),
    ):
        cls = getattr(sys.modules[place], name)
        patched = conditional(cls.forward, patcher, lambda *_: devices.unet_needs_upcast)
        twice = conditional(patched, "modules.sd_hijack_unet", lambda *_: False)
        monkeypatch.setattr(cls, "forward", twice)
    p = job()
    assert close(host.unet(), plain)
    status = graphs.status()
    if patcher == "another_extension":
        assert status.running == "eager"
        assert "GEGLU is patched by" in status.line()
    else:
        assert status.running == "compiled", status
        assert status.kinds_ready == status.kinds_needed > 0
    graphs.end(p)


@pytest.mark.usefixtures("built")
def test_a_hypernetwork_of_the_job_before(
    host: A1111StandIn, graphs: GraphsForJobs, options: CompileOptions
) -> None:
    """A1111 unloads it only when the next job's networks are activated."""
    _set("modules.shared", "loaded_hypernetworks", [object()])
    p = FakeProcessing()
    p.all_prompts, p.extra_network_data = ["a fox"], None
    graphs.begin(p, options)
    assert graphs.status().line() == "compiled"
    _set("modules.shared", "loaded_hypernetworks", [])
    p.extra_network_data = {}
    graphs.before_sampling(p)
    host.unet()
    assert graphs.status().running == "compiled", graphs.status()
    graphs.end(p)


@pytest.mark.usefixtures("built")
def test_a_hypernetwork_of_this_job(
    host: A1111StandIn, graphs: GraphsForJobs, options: CompileOptions
) -> None:
    """Known before it is loaded, so that a job that is to stop for it stops at once."""
    p = FakeProcessing()
    p.all_prompts, p.extra_network_data = ["a fox <hypernet:sketch:1>"], None
    graphs.begin(p, options)
    assert "hypernetwork" in graphs.status().line()
    _set("modules.shared", "loaded_hypernetworks", [object()])
    p.extra_network_data = {"hypernet": []}
    graphs.before_sampling(p)
    assert "hypernetwork" in graphs.status().line()
    graphs.end(p)


@pytest.mark.usefixtures("built")
def test_a_controlnet_that_the_job_before_left_behind(
    host: A1111StandIn, graphs: GraphsForJobs, options: CompileOptions
) -> None:
    """After an error, the extension lets the UNet go only when the next job begins."""
    unet = host.model.model.diffusion_model
    host.control(unet, 2)
    p = FakeProcessing()
    graphs.begin(p, options)
    host.restore(unet)
    graphs.before_sampling(p)
    host.unet()
    assert graphs.status().line() == "compiled"
    graphs.end(p)


@pytest.mark.usefixtures("built")
def test_layers_that_cast_by_hand(
    graphs: GraphsForJobs, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Linear, "org_forward", nn.Linear.forward, raising=False)
    p = job()
    assert "cast by hand" in graphs.status().line()
    graphs.end(p)


@pytest.mark.usefixtures("built")
def test_a_blocks_own_inner_forward_is_foreign_until_it_is_put_back(
    host: A1111StandIn, graphs: GraphsForJobs, job: Any
) -> None:
    """ControlNet's reference mode replaces `_forward` of blocks, and puts it back by hand."""
    block = host.model.model.diffusion_model.transformer
    original = block._forward
    plain = host.unet()
    needed = graphs.status().kinds_needed
    p = job()
    assert close(host.unet(), plain)
    block.bank, block.style_cfgs, block.attn_weight = [], [0.5], 0.25  # these stay for good
    block._forward = lambda x, context=None: original(x, context) + 1
    doubled = host.unet()
    assert not close(doubled, plain)
    block._forward = original
    fallbacks = len(graphs.session.fallbacks())
    assert close(host.unet(), plain)
    assert len(graphs.session.fallbacks()) == fallbacks == 1
    assert "replaced forward" in graphs.status().reasons[0]
    graphs.end(p)
    p = job()
    assert close(host.unet(), plain)
    assert not graphs.status().reasons  # of the job before
    assert graphs.status().kinds_needed == needed
    graphs.end(p)
    del block._forward


@pytest.mark.usefixtures("built")
def test_a_setting_that_reaches_into_layers(
    host: A1111StandIn, graphs: GraphsForJobs, job: Any
) -> None:
    """ "Tiling" changes the padding of convolutions, which is part of what a kind is."""
    layers = [m for m in host.model.modules() if isinstance(m, nn.Conv2d)]
    plain = host.unet()
    for layer in layers:
        layer.padding_mode = "circular"
        layer._reversed_padding_repeated_twice = [1, 1, 1, 1] if layer.padding[0] else [0] * 4
    _set("modules.sd_hijack", "model_hijack", SimpleNamespace(circular_enabled=True))
    tiled = host.unet()
    assert not close(plain, tiled)
    p = job()
    for _ in range(3):
        assert close(host.unet(), tiled)
    graphs.end(p)
    for layer in layers:
        layer.padding_mode = "zeros"
    _set("modules.sd_hijack", "model_hijack", SimpleNamespace(circular_enabled=False))
    p = job()
    assert close(host.unet(), plain)
    graphs.end(p)


def test_a_picture_with_tiling_before_plain_ones_while_graphs_are_built(
    host: A1111StandIn, graphs: GraphsForJobs, tmp_path: Path
) -> None:
    options = CompileOptions(backend="eager", build="background", store=tmp_path, workers=1)
    layers = [m for m in host.model.modules() if isinstance(m, nn.Conv2d)]

    def tile(on: bool) -> None:
        for layer in layers:
            layer.padding_mode = "circular" if on else "zeros"
            layer._reversed_padding_repeated_twice = [1, 1, 1, 1] if layer.padding[0] else [0] * 4
        _set("modules.sd_hijack", "model_hijack", SimpleNamespace(circular_enabled=on))

    def draw(expected: torch.Tensor, pictures: int = 1) -> Any:
        for _ in range(pictures):
            p = FakeProcessing()
            graphs.begin(p, options)
            graphs.before_sampling(p)
            assert close(host.unet(), expected)
            graphs.end(p)
            assert graphs.session is not None
        return graphs.session

    plain = host.unet()
    tile(True)
    tiled = host.unet()
    with builds_on_hold(session_for(graphs, options)):
        draw(tiled)
        tile(False)
        session = draw(plain)
    assert session.wait_for_builds(120)
    put_off = {kind for kind in session.kinds if "has changed" in kind.reason}
    assert put_off
    for _ in range(3):
        draw(plain)
        assert session.wait_for_builds(120)
    draw(plain)
    assert graphs.status().line() == "compiled"
    tile(True)
    for _ in range(5):
        draw(tiled)
        assert session.wait_for_builds(120)
    draw(tiled)
    assert graphs.status().line() == "compiled"
    assert all(kind.graph is not None for kind in session.kinds)
    tile(False)
    graphs.close()


def session_for(graphs: GraphsForJobs, options: CompileOptions) -> Any:
    """The session that a job with these options has; it builds as it does for users."""
    p = FakeProcessing()
    graphs.begin(p, options)
    graphs.end(p)
    session = graphs.session
    assert session is not None
    session.build_context.export_children = 0  # quicker on a machine with other work
    vars(session.build_context)["new_worker"] = lambda cache, background: InstantWorker(
        "eager", cache
    )
    return session


def test_a_failure_of_our_own_draws_eager(
    host: A1111StandIn,
    graphs: GraphsForJobs,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: A1111Host, ignores: frozenset[str]) -> list[Any]:
        raise ValueError("no idea what this model is")

    before = host.attributes()
    monkeypatch.setattr(A1111Host, "models", fail)
    p = job()
    assert host.attributes() == before
    assert graphs.status().reasons == ("failed: no idea what this model is",)
    assert graphs.status().running == "eager"
    p.close()


# ------------------------------------------------------------------ warming up


def test_warm_up_builds_without_drawing(
    host: A1111StandIn, graphs: GraphsForJobs, options: CompileOptions
) -> None:
    before, random = host.attributes(), torch.get_rng_state()
    shapes = [BatchShape(64, 64), BatchShape(72, 128, 2)]
    report = WarmUpJobs(graphs).run(shapes, options)
    assert [figures.shape for figures in report.sizes] == shapes
    assert "AttnBlock 16" in {kind.label for kind in graphs.session.kinds}
    assert graphs.status().kinds_ready == graphs.status().kinds_needed > 0
    assert host.attributes() == before
    assert torch.equal(torch.get_rng_state(), random)


def test_a_warm_up_lets_pictures_go_first(
    host: A1111StandIn,
    graphs: GraphsForJobs,
    options: CompileOptions,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds the host's queue, and gives it up to a picture that waits there."""
    expected = host.unet()
    passes: list[str] = []
    run = graphs.host.run_exclusively

    def run_exclusively(task: Callable[[], None]) -> None:
        passes.append("warm-up")
        run(task)
        if len(passes) == 1:
            passes.append("picture")
            p = job()
            assert close(host.unet(), expected)
            graphs.end(p)

    monkeypatch.setattr(graphs.host, "run_exclusively", run_exclusively)
    monkeypatch.setattr(graphs.host, "is_waited_for", lambda: len(passes) == 1)
    shapes = [BatchShape(64, 64), BatchShape(64, 72)]
    report = WarmUpJobs(graphs).run(shapes, options)
    assert passes == ["warm-up", "picture", "warm-up"]
    assert report is not None
    assert [figures.shape for figures in report.sizes] == shapes
    assert not report.gave_way
    assert graphs.status().running == "compiled"


@pytest.mark.parametrize("happening", ["cancelled", "another checkpoint"])
def test_what_happens_while_a_warm_up_waits_for_its_turn(
    host: A1111StandIn,
    graphs: GraphsForJobs,
    options: CompileOptions,
    monkeypatch: pytest.MonkeyPatch,
    happening: str,
) -> None:
    """Behind the picture to which it gave way."""
    warm_ups = WarmUpJobs(graphs)
    passes: list[str] = []
    run = graphs.host.run_exclusively

    def run_exclusively(task: Callable[[], None]) -> None:
        passes.append("waits")
        if len(passes) == 2 and happening == "cancelled":
            warm_ups.cancel()
        elif len(passes) == 2:
            other = HostCheckpoint("other", "0123456789", "sd1")
            monkeypatch.setattr(graphs.host, "checkpoint", lambda: other)
        before = len(steps)
        run(task)
        if len(passes) == 2:
            assert len(steps) == before

    steps: list[BatchShape] = []
    step = graphs.host.step

    def counted(shape: BatchShape, noise: torch.Generator) -> None:
        steps.append(shape)
        step(shape, noise)

    monkeypatch.setattr(graphs.host, "step", counted)
    monkeypatch.setattr(graphs.host, "run_exclusively", run_exclusively)
    # Somebody wants a picture once the first size is measured.
    waited_for = iter([False] * 12 + [True] * 99)
    monkeypatch.setattr(graphs.host, "is_waited_for", lambda: next(waited_for))
    report = warm_ups.run([BatchShape(64, 64), BatchShape(64, 72)], options)
    assert report is not None
    assert len(passes) == 2
    assert steps
    ended = "Cancelled." if happening == "cancelled" else "The warm-up ended early."
    assert report.line().startswith(ended)


@pytest.mark.usefixtures("host")
def test_who_waits_in_the_hosts_queue_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = sys.modules["modules.call_queue"]
    assert not A1111Host().is_waited_for()
    monkeypatch.setattr(queue, "queue_lock", SimpleNamespace(_pending_threads=[object()]))
    assert A1111Host().is_waited_for()


def test_warm_up_is_cancelled_between_sizes(
    host: A1111StandIn,
    graphs: GraphsForJobs,
    options: CompileOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm_ups, measure = WarmUpJobs(graphs), WarmUp._measure

    def stop(warm_up: WarmUp, *given: Any) -> None:
        measure(warm_up, *given)
        warm_ups.cancel()

    monkeypatch.setattr(WarmUp, "_measure", stop)
    shapes = [BatchShape(64, 64 + 8 * n) for n in range(3)]
    report = warm_ups.run(shapes, options)
    assert report.cancelled
    assert len(report.sizes) == 1


def test_background_builds_serve_from_the_next_picture_on(
    host: A1111StandIn, graphs: GraphsForJobs, tmp_path: Path
) -> None:
    options = CompileOptions(backend="eager", build="background", store=tmp_path, workers=1)
    expected = host.unet()
    before = host.attributes()
    p = FakeProcessing()
    graphs.begin(p, options)
    graphs.before_sampling(p)
    assert close(host.unet(), expected)
    graphs.end(p)
    assert host.attributes() == before
    assert graphs.session.wait_for_builds(120)
    assert graphs.status().kinds_ready == 3
    graphs.begin(p, options)
    graphs.before_sampling(p)
    for _ in range(2):
        assert close(host.unet(), expected)
    graphs.end(p)
    assert graphs.status().running == "compiled", graphs.status()
    graphs.close()


def test_status_counts_the_current_checkpoints_kinds_again(
    host: A1111StandIn, graphs: GraphsForJobs, job: Any
) -> None:
    """A kind that a block has named before belongs to the next checkpoint too."""
    for name in ("a", "b", "a"):
        host.model.sd_checkpoint_info = SimpleNamespace(
            name_for_extra=name, shorthash=name, sha256=name * 64, filename=f"{name}.safetensors"
        )
        p = job()
        host.unet()
        graphs.end(p)
        assert graphs.session.checkpoint.content_hash == name * 64
        assert graphs.status().kinds_needed == 3
