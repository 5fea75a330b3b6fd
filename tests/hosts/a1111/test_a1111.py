"""A1111's adapter and the graphs of a job, on a stand-in of the host."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.blocks import group_norm_family as torch_families
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support.a1111_stand_in import (
    A1111StandIn,
    FakeModel,
    FakeProcessing,
    close,
)

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
