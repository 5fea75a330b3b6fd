"""Builds beside A1111's jobs: in the background, ahead of them, and failed ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.core.options import CompileOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.hosts.a1111.host import A1111Host
from onediff_ext.hosts.base import HostCheckpoint
from onediff_ext.session.warm_up import WarmUp
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from onediff_ext.webui.warm_up_jobs import WarmUpJobs
from tests.support.a1111_stand_in import (
    A1111StandIn,
    FakeProcessing,
    close,
)
from tests.support.held_builds import builds_on_hold
from tests.support.session_fixtures import InstantWorker


def test_a_picture_with_tiling_before_plain_ones_while_graphs_are_built(
    host: A1111StandIn, graphs: GraphsForJobs, tmp_path: Path
) -> None:
    options = CompileOptions(backend="eager", build="background", store=tmp_path, workers=1)
    layers = [m for m in host.model.modules() if isinstance(m, nn.Conv2d)]

    def tile(on: bool) -> None:
        for layer in layers:
            layer.padding_mode = "circular" if on else "zeros"
            layer._reversed_padding_repeated_twice = [1, 1, 1, 1] if layer.padding[0] else [0] * 4
        sys.modules["modules.sd_hijack"].model_hijack = SimpleNamespace(circular_enabled=on)

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


@pytest.mark.parametrize("is_sdxl", [False, True])
def test_a_warm_up_calls_the_unet_as_the_sampler_does(host: A1111StandIn, is_sdxl: bool) -> None:
    """Seen in the running A1111: ``timesteps`` by place with ldm's UNet, by name with sgm's."""
    calls = []
    unet = host.model.model.diffusion_model
    unet.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    host.model.is_sdxl = is_sdxl
    A1111Host().step(BatchShape(64, 64), torch.Generator().manual_seed(0))
    ((args, kwargs),) = calls
    assert (len(args), list(kwargs)) == (
        (1, ["timesteps", "context"]) if is_sdxl else (2, ["context"])
    )


def test_a_warm_up_leaves_the_reasons_of_the_last_picture(
    host: A1111StandIn, graphs: GraphsForJobs, options: CompileOptions, job: Any
) -> None:
    """NegPiP hooks layers for one job. *Build now* runs without it, and the header went green."""
    warm_ups, shapes = WarmUpJobs(graphs), [BatchShape(64, 64)]
    warm_ups.run(shapes, options)
    p = job()
    block = host.model.model.diffusion_model.transformer
    handle = next(block.children()).register_forward_hook(lambda *_: None)
    host.unet()
    handle.remove()
    graphs.end(p)
    before = graphs.status()
    assert before.running != "compiled"
    assert before.eager_blocks
    for _ in range(2):
        assert warm_ups.run(shapes, options) is not None
        after = graphs.status()
        assert (after.running, after.eager_blocks) == (before.running, before.eager_blocks)
        assert set(before.reasons) <= set(after.reasons)
    p = job()
    host.unet()
    graphs.end(p)
    assert graphs.status().running == "compiled"


def test_a_warm_up_leaves_the_reason_of_a_picture_that_was_refused(
    graphs: GraphsForJobs, options: CompileOptions, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_ups, shapes = WarmUpJobs(graphs), [BatchShape(64, 64)]
    with monkeypatch.context() as patch:
        patch.setattr(A1111Host, "refusal_reason", lambda self, p: "a hypernetwork is on")
        graphs.end(job())
        warm_ups.run(shapes, options)
    for _ in range(2):
        assert warm_ups.run(shapes, options) is not None
        assert (graphs.status().running, graphs.status().reasons[0]) == (
            "eager",
            "a hypernetwork is on",
        )
    graphs.model_loaded()
    assert graphs.status().reasons == ()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("how", ["interrupted", "skipped"])
def test_an_interrupted_job_shows_no_time(
    host: A1111StandIn, graphs: GraphsForJobs, job: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A job that *stop* had ended said "Last picture: 0.1 s"."""
    p = job()
    host.unet()
    graphs.end(p)
    assert graphs.status().picture_s is not None
    with monkeypatch.context() as patch:
        state = SimpleNamespace(**{how: True})
        patch.setattr(sys.modules["modules.shared"], "state", state, raising=False)
        p = job()
        graphs.end(p)
    assert graphs.status().picture_s is None
    p = job()
    graphs.end(p)
    assert graphs.status().picture_s is not None


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
