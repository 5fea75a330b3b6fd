"""What A1111 or another extension changes: such blocks and jobs run eager and say so."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.running.block_runner import BlockRunner
from onediff_ext.session.model_component import Component
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support import ldm_stand_in
from tests.support.a1111_stand_in import (
    A1111StandIn,
    FakeProcessing,
    close,
    conditional,
)
from tests.support.ldm_stand_in import written_in


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
@pytest.mark.parametrize("installer", ["modules.sd_hijack_utils", "networks_boost"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(functional, "silu"), (torch.Tensor, "chunk"), (nn.SiLU, "forward")],
    ids=["function", "tensor", "layer"],
)
def test_what_others_put_into_torch_by_a1111s_own_means(
    host: A1111StandIn,
    graphs: GraphsForJobs,
    job: Any,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    installer: str,
) -> None:
    """A1111's CondFunc, or a file whose name begins as that of A1111's Lora does."""
    own = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        return tuple(reversed(result)) if isinstance(result, tuple) else result * 0.5

    plain = host.unet()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, written_in(changed, installer))
        expected = host.unet()
        p = job()
        assert close(host.unet(), expected)
        assert not close(expected, plain)
        assert installer in graphs.status().line()
        graphs.end(p)
    p = job()
    assert close(host.unet(), plain)
    assert graphs.status().running == "compiled", graphs.status()
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
