"""A plain call of a pipeline is a picture, and does no more work than an announced one."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline

from onediff_ext.building import foreground_scheduler
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.running import kind_lookup
from onediff_ext.hosts.diffusers.compile import compile_pipe, one_picture, undo_compile
from onediff_ext.hosts.diffusers.compile_module import compile_module
from onediff_ext.session.session import Session
from tests.support import adapter_weights, models
from tests.support.counted_work import counted_work
from tests.support.draw import draw_latents, relative_error
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.models import unet_inputs


class PlainPipeline(StableDiffusionPipeline):
    """The class of this file's pipelines: those of other tests may still be watched."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


CALL = PlainPipeline.__call__


def plain_pipe() -> Any:
    return PlainPipeline(**models.sd15().components, requires_safety_checker=False)


@pytest.fixture
def session(make_session: Callable[..., Session]) -> Session:
    return make_session(spot_checks=False)


def draw(pipe: Any, **more: Any) -> torch.Tensor:
    """A picture of two steps, with its pixels."""
    latents: torch.Tensor = pipe(
        "a cat", num_inference_steps=2, height=64, width=72, output_type="pt",
        generator=torch.Generator().manual_seed(3), **more,
    ).images  # fmt: skip
    return latents


class Pictures:
    """The pictures of a session, as its forwards see them."""

    def __init__(self, session: Session, pipe: Any) -> None:
        self.foreground, self.seen = session.foreground, list[tuple[int, int]]()
        for model in (pipe.unet, pipe.vae.decoder):
            model.register_forward_pre_hook(lambda *_: self._note())

    def _note(self) -> None:
        self.seen.append((self.foreground.pictures_begun, self.foreground.epoch))

    def take(self) -> list[tuple[int, int]]:
        """The pictures since the last call of this, each once."""
        seen, self.seen = list(dict.fromkeys(self.seen)), []
        return seen


@pytest.fixture
def pipe(session: Session) -> Any:
    pipe = plain_pipe()
    compile_pipe(pipe, session=session)
    yield pipe
    undo_compile(pipe)
    assert PlainPipeline.__call__ is CALL


@pytest.fixture
def pictures(session: Session, pipe: Any) -> Pictures:
    return Pictures(session, pipe)


def test_each_call_is_one_picture(pipe: Any, pictures: Pictures, session: Session) -> None:
    for number in (1, 2):
        draw(pipe)
        assert pictures.take() == [(number, number)]
        assert not session.foreground._is_open()


def test_calls_within_a_callback_belong_to_the_picture(
    pipe: Any, pictures: Pictures, session: Session
) -> None:
    inner = compile_pipe(models.sd15(seed=2), session=session)
    of_inner = Pictures(session, inner)

    def preview(outer: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        draw(inner)
        with torch.no_grad():
            outer.vae.decode(kwargs["latents"])
        return kwargs

    draw(pipe, callback_on_step_end=preview)
    assert pictures.take() == of_inner.take() == [(1, 1)]
    draw(pipe)
    assert pictures.take() == [(2, 2)]
    undo_compile(inner)


def test_an_exception_ends_the_picture(pipe: Any, pictures: Pictures, session: Session) -> None:
    def stop(*_: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    for call in (lambda: draw(pipe, callback_on_step_end=stop), lambda: pipe(prompt=3)):
        with pytest.raises((KeyboardInterrupt, ValueError)):
            call()
        assert not session.foreground._is_open()
    pictures.take()
    draw(pipe)
    assert pictures.take() == [(3, 3)]


def test_a_callers_own_picture_holds_several_calls(pipe: Any, pictures: Pictures) -> None:
    with one_picture(pipe):
        draw(pipe)
        draw(pipe)
    assert pictures.take() == [(1, 1)]


class OwnPipeline(StableDiffusionPipeline):
    """A pipeline with a call of its own, which checks and frees nothing."""

    @torch.no_grad()
    def __call__(self, latents: torch.Tensor, prompt: torch.Tensor) -> Any:
        self.scheduler.set_timesteps(3)
        for t in self.scheduler.timesteps:
            noise = self.unet(latents, t, prompt).sample
            latents = self.scheduler.step(noise, t, latents).prev_sample
        return self.vae.decode(latents).sample


def test_any_pipeline_class(session: Session) -> None:
    pipe = OwnPipeline(**models.sd15().components, requires_safety_checker=False)
    own = OwnPipeline.__call__
    compile_pipe(pipe, session=session)
    pictures = Pictures(session, pipe)
    for number in (1, 2):
        pipe(torch.randn(1, 4, 8, 8), torch.randn(1, 77, models.TEXT_WIDTH))
        assert pictures.take() == [(number, number)]
    undo_compile(pipe)
    assert OwnPipeline.__call__ is own


def test_the_class_is_the_same_object(pipe: Any) -> None:
    assert type(pipe) is PlainPipeline
    assert type(copy.deepcopy(pipe)) is type(pickle.loads(pickle.dumps(pipe))) is type(pipe)
    assert StableDiffusionXLPipeline.__call__.__module__.startswith("diffusers.")


def test_other_pipelines_of_the_class_are_nobodys_pictures(
    pipe: Any, pictures: Pictures, session: Session
) -> None:
    for other in (plain_pipe(), copy.copy(plain_pipe()), copy.deepcopy(pipe)):
        draw(other)
        assert session.foreground.pictures_begun == 0


def test_the_class_is_restored_after_its_last_pipeline(pipe: Any, session: Session) -> None:
    others = [compile_pipe(plain_pipe(), session=session) for _ in range(2)]
    compile_pipe(others[0], session=session)  # again
    undo_compile(others[0])
    assert PlainPipeline.__call__ is not CALL
    undo_compile(pipe)
    assert PlainPipeline.__call__ is not CALL
    others.clear()  # without undo
    gc.collect()
    assert PlainPipeline.__call__ is CALL


def test_another_extensions_call_stays(
    pipe: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = PlainPipeline.__call__
    calls = []

    def foreign(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return ours(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(PlainPipeline, "__call__", foreign)
        undo_compile(pipe)
        assert "another extension has replaced PlainPipeline.__call__" in caplog.text
        draw(pipe)
        assert calls == [pipe]
    PlainPipeline.__call__ = CALL  # type: ignore[method-assign]


# ------------------------------------------------------------------ the same work


def lora(pipe: Any) -> None:
    pipe.load_lora_weights(adapter_weights.lora_tensors(pipe, text=False))


class Way:
    """A way to draw with a compiled model.

    Args:
        compile: Compiles a pipeline.
        announced: A host says where pictures begin.
    """

    def __init__(self, compile: Callable[[Any, Session], Any], announced: bool) -> None:
        self.compile, self.announced = compile, announced

    def work(self, session: Session, pipe: Any) -> list[Counter[str]]:
        """Draw until everything is built, compared and recorded; return the work of a first
        picture, of later ones, and after a weight has been written past the version counter."""
        self.compile(pipe, session)
        counts = []
        with counted_work() as counted:
            for number in range(8):
                if number == 6:
                    # The middle has too few tokens for int8 at this size.
                    weight = pipe.unet.down_blocks[0].attentions[0].transformer_blocks[0].ff.net[2]
                    getattr(weight, "base_layer", weight).weight.data.mul_(1.5)
                counted.clear()
                with session.picture() if self.announced else nullcontext():
                    draw_latents(pipe, height_px=64, width_px=72)
                counts.append(counted.copy())
        undo_compile(pipe)
        undo_compile(pipe.unet)
        # Exports of the first picture look at blocks too, once for all tests of a process.
        kept = ("graphs exported and built", "copies in 8 bits", "comparisons of weights")
        return [Counter({what: counts[0][what] for what in kept}), *counts[1:]]


WAYS = {
    "announced": Way(lambda pipe, session: compile_module(pipe.unet, session=session), True),
    "module": Way(lambda pipe, session: compile_module(pipe.unet, session=session), False),
    "pipe": Way(lambda pipe, session: compile_pipe(pipe, session=session), False),
}


@pytest.mark.parametrize(
    ("precision", "change", "captures"),
    [("exact", None, True), ("int8", None, True), ("int8", lora, False)],
)
def test_a_plain_call_does_the_work_of_an_announced_one(
    make_session: Callable[..., Session],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    precision: str,
    change: Callable[[Any], None] | None,
    captures: bool,
) -> None:
    monkeypatch.setattr(kind_lookup, "unavailable_reason", lambda *_: None)  # 8 bits on a CPU
    # A slow machine, or a build between two steps, is no silence: schedules alone tell here.
    monkeypatch.setattr(foreground_scheduler, "QUIET_S", 600.0)
    work: dict[str, list[Counter[str]]] = {}
    for name, way in WAYS.items():
        session = make_session(precision=precision, spot_checks=False, store=tmp_path / name)
        pipe = models.sd15()
        if captures:
            session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=4)
        if change is not None:
            change(pipe)
        work[name] = way.work(session, pipe)
    assert work["pipe"] == work["module"] == work["announced"]
    built = [counts["graphs exported and built"] for counts in work["pipe"]]
    assert sum(built) == built[0] > 5
    copied = [counts["copies in 8 bits"] for counts in work["pipe"]]
    assert sum(copied) == (0 if precision == "exact" else copied[0] + copied[1] + copied[6])
    assert bool(copied[6]) == (precision == "int8")
    if precision == "int8" or change is not None:
        assert [counts["comparisons of weights"] for counts in work["pipe"][3:]] == [1] * 5


def test_a_plain_picture_is_right_after_each_kind_of_write(session: Session) -> None:
    pipe, twin = models.sd15(), models.sd15()
    lora(pipe)
    lora(twin)
    compile_module(pipe.unet, session=session)
    for factor in (1.0, 1.5, 0.5, 2.0):
        for each in (pipe, twin):
            block = each.unet.mid_block.attentions[0].transformer_blocks[0]
            block.attn1.to_q.base_layer.weight.data.mul_(factor)
            block.attn1.to_k.lora_A["default_0"].weight.data.mul_(factor)
        for _ in range(2):
            assert relative_error(draw_latents(pipe), draw_latents(twin)) < 1e-4


def test_a_silence_between_two_calls_of_a_bare_module_ends_its_picture(session: Session) -> None:
    """All calls follow one schedule, so nothing else tells them apart."""
    pipe, twin = models.sd15(), models.sd15()
    lora(pipe)
    lora(twin)
    compile_module(pipe.unet, session=session)
    seconds = 0.0
    session.foreground._now = lambda: seconds
    given, schedule = unet_inputs(pipe.unet, 1, 8, 8), torch.linspace(999, 1, 20)

    @torch.no_grad()
    def error(step: int) -> float:
        inputs = {**given, "timestep": schedule[step]}
        return relative_error(pipe.unet(**inputs).sample, twin.unet(**inputs).sample)

    assert max(error(step) for step in range(4)) < 1e-4
    assert session.foreground.pictures_begun == 1
    for each in (pipe, twin):
        block = each.unet.mid_block.attentions[0].transformer_blocks[0]
        block.attn1.to_k.lora_B["default_0"].weight.data.mul_(-3.0)  # counted by nobody
    seconds += 0.9 * foreground_scheduler.QUIET_S
    assert error(4) > 1e-3  # it takes effect with the next picture
    assert session.foreground.pictures_begun == 1
    seconds += foreground_scheduler.QUIET_S
    assert error(5) < 1e-4
    assert session.foreground.pictures_begun == 2
