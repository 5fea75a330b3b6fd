"""What only Neo has: its own compiler, layers with quantized weights, weights written in place."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.detect import host_name
from onediff_ext.hosts.neo.host import NeoHost
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support.forge_stand_in import ADAPTERS, FakeProcessing, ForgeStandIn, running
from tests.support.forge_transformers.draws import TRANSFORMERS, noise
from tests.support.strict_recorder import StrictRecorder


@pytest.fixture
def model(host: ForgeStandIn) -> Any:
    """Neo's KModel."""
    return host.engine.forge_objects.unet.model


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_each_host_is_told_by_what_it_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(name), monkeypatch.context() as patched:
        patched.setitem(sys.modules, "modules_forge", ModuleType("modules_forge"))
        for package in {"modules_forge", "ldm_patched"} & sys.modules.keys():
            patched.setattr(sys.modules[package], "__spec__", ModuleSpec(package, None))
        assert host_name() == name


def test_nothing_is_refused_in_a_plain_job(host: ForgeStandIn) -> None:
    assert NeoHost().refusal_reason(None) is None


@pytest.mark.parametrize(
    "attribute", ["_torch_compile_config", "_compile_config", "_compiled_backup"]
)
def test_neos_own_compiler(host: ForgeStandIn, model: Any, attribute: str) -> None:
    setattr(model, attribute, ("dynamic",))
    assert "set its preset to Disable" in str(NeoHost().refusal_reason(None))
    setattr(model, attribute, None)
    assert NeoHost().refusal_reason(None) is None


def test_a_unet_that_neo_has_compiled(host: ForgeStandIn, model: Any) -> None:
    model.diffusion_model = torch.compile(model.diffusion_model, backend="eager")
    assert "set its preset to Disable" in str(NeoHost().refusal_reason(None))


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ("ForgeOperationsFP8", "start Neo without --fast-fp8"),
        ("ForgeOperationsGGUF", "stored as gguf: choose a checkpoint in fp16"),
        ("ForgeOperationsBNB4bits", "stored in 4 bits: choose a checkpoint in fp16"),
        ("MixedPrecisionOps", "quantized (MixedPrecisionOps): choose a checkpoint in fp16"),
    ],
)
def test_layers_with_quantized_weights(host: ForgeStandIn, layers: str, reason: str) -> None:
    sys.modules["backend.args"].dynamic_args.ops = layers
    assert reason in str(NeoHost().refusal_reason(None))


def test_nunchaku(host: ForgeStandIn) -> None:
    sys.modules["backend.args"].dynamic_args.nunchaku = True
    assert "nunchaku" in str(NeoHost().refusal_reason(None))


def test_a_model_that_is_only_partly_on_the_gpu(host: ForgeStandIn, model: Any) -> None:
    """Its blocks are judged one by one."""
    model.model_lowvram = True
    assert NeoHost().refusal_reason(None) is None


def test_a_refiner_whose_weights_are_written_in_place(host: ForgeStandIn, tmp_path: Path) -> None:
    """CUDA graphs and all that was seen of the blocks are valid until then."""
    adapter = NeoHost()
    graphs = GraphsForJobs(adapter)
    p = FakeProcessing()
    graphs.begin(p, CompileOptions(backend="eager", build="wait", store=tmp_path, workers=1))
    graphs.before_sampling(p)
    for _ in range(2):
        host.draw()
    before = list(graphs.models.attached)
    with torch.inference_mode():
        weights = {name: 0.5 * weight for name, weight in host.unet.state_dict().items()}
    sys.modules["backend.state_dict"].load_state_dict(host.unet, weights)
    graphs.before_step()
    assert not set(map(id, graphs.models.attached)) & set(map(id, before))
    found = host.draw()
    graphs.end(p)
    assert torch.allclose(found, host.draw(), atol=1e-5, rtol=1e-4)
    assert sys.modules["backend.state_dict"].load_state_dict.__module__.startswith("tests.")
    graphs.close()


def test_a_vae_of_another_form_is_not_warmed_up(host: ForgeStandIn) -> None:
    """Its blocks are unknown, and it may take videos."""
    host.engine.forge_objects.vae.first_stage_model = type("WanVAE", (torch.nn.Module,), {})()
    NeoHost().vae_step()


def test_pictures_to_edit_are_no_part_of_a_recording(host: ForgeStandIn, tmp_path: Path) -> None:
    """Neo's transformers read them from a global of the process, which no argument shows."""
    flux, recorder, p = TRANSFORMERS["neo flux"], StrictRecorder(), FakeProcessing()
    host.load(0, transformer=flux.make)
    graphs = GraphsForJobs(NeoHost())
    graphs.begin(p, CompileOptions(backend="eager", build="wait", store=tmp_path, workers=1))
    assert graphs.session is not None
    graphs.session.cuda_graphs = CudaGraphCache(recorder)
    graphs.before_sampling(p)
    for seed in range(7):
        flux.draw(host.unet, seed=seed)
    assert recorder.recorded == 1
    arguments = sys.modules["backend.args"].dynamic_args
    drawn = [flux.draw(host.unet)]
    for picture in (noise(1, 16, 6, 8), noise(1, 16, 6, 8, seed=2), noise(1, 16, 8, 8)):
        arguments.ref_latents = [picture]
        drawn += [flux.draw(host.unet) for _ in range(7)][-1:]
    graphs.end(p)
    for found, picture in zip(
        drawn,
        (None, noise(1, 16, 6, 8), noise(1, 16, 6, 8, seed=2), noise(1, 16, 8, 8)),
        strict=True,
    ):
        arguments.ref_latents = None if picture is None else [picture]
        assert torch.allclose(found, flux.draw(host.unet), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(drawn[1], drawn[2], atol=1e-3)
    graphs.close()
