"""The gate of diffusers pipelines: whose outputs are used, when none are, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.deepcache.features import Feature
from onediff_ext.engine.guidance import attention_gate
from onediff_ext.engine.guidance.attention_gate import (
    CHANGED,
)
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state
from onediff_ext.hosts.diffusers.deepcache import enable_deepcache
from onediff_ext.hosts.diffusers.deepcache_unet import DiffusersUNet
from onediff_ext.session.session import Session
from tests.hosts.diffusers.gate_draws import GATE, INTERVAL, STEPS, at, expected, reason_of
from tests.hosts.diffusers.test_chosen_guidance_steps import (
    attributes,
    draw,
    eager,
)
from tests.hosts.diffusers.test_guidance_steps import PIPELINES, draw_and_look
from tests.support import adapter_weights, models
from tests.support.deepcache_draws import counts
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.plain_gate import plain_gate

NewSession = Callable[..., Session]


@pytest.fixture
def pipe() -> Any:
    return models.sd15()


@pytest.mark.parametrize("name", [name for name in PIPELINES if not name.startswith("sd3")])
def test_every_pipeline_with_a_unet_draws_what_the_gate_written_out_draws(name: str) -> None:
    make, arguments, steps, calls_a_step = PIPELINES[name]
    pipe = make()
    run = int(steps * arguments.get("strength", 1))
    with plain_gate(pipe, round(0.4 * run), calls_a_step):
        by_hand = draw_and_look(pipe, "off", steps=steps, **arguments)[0]
    found, seen = draw_and_look(pipe, "gate:0.4", steps=steps, **arguments)
    assert relative_error(found, by_hand) < 1e-4
    assert seen is not None
    assert seen.gate is not None
    assert (seen.reason, seen.gate.reason) == ("", "")
    assert seen.gate.frozen == seen.counts["prompt"] > 0
    interval, _ = draw_and_look(pipe, "interval:0-0.4", steps=steps, **arguments)
    assert relative_error(interval, by_hand) > 1e-4


def test_nothing_is_left_behind(pipe: Any) -> None:
    plain, names = draw(pipe), attributes(pipe)
    eager(pipe, GATE)
    assert attributes(pipe) == names
    assert torch.equal(draw(pipe), plain)
    gc.collect()
    assert not attention_gate._models[pipe.unet].alive


def test_an_interrupted_picture_leaves_nothing_to_the_next_one(
    pipe: Any, make_session: NewSession
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    by_hand = expected(pipe, prompt=["a lake", "a fox"])
    interval, _ = eager(pipe, INTERVAL)
    compile_pipe(pipe, session=make_session(), ignores=["vae"], guidance_steps=GATE)
    for step in range(STEPS):
        with pytest.raises(KeyboardInterrupt):
            draw(pipe, **at(step, interrupt))
        # One that is not kept at all: the gate's step is another call.
        found = draw(pipe, prompt=["a lake", "a fox"])
        assert relative_error(found, by_hand) < 1e-4
    assert relative_error(interval, by_hand) > 1e-3


@pytest.mark.parametrize("is_compiled", [False, True])
def test_loras_and_weights_count_from_the_next_picture(
    is_compiled: bool, make_session: NewSession
) -> None:
    pipe, reference = models.sd15(), models.sd15()
    for each in (pipe, reference):
        each.load_lora_weights(adapter_weights.lora_tensors(each, text=False), adapter_name="one")
    if is_compiled:
        compile_pipe(pipe, session=make_session(), ignores=["vae"], guidance_steps=GATE)
    results = []
    for weight in (0.5, 1.5, 0.5):
        for each in (pipe, reference):
            each.set_adapters("one", weight)
        by_hand = expected(reference)
        for _ in range(2):
            found = draw(pipe) if is_compiled else eager(pipe, GATE)[0]
            assert relative_error(found, by_hand) < 1e-4
        results.append(found)
    assert relative_error(results[0], results[1]) > 1e-3
    for each in (pipe, reference):
        each.disable_lora()
        with torch.no_grad():
            for parameter in each.unet.parameters():
                parameter.mul_(1.02)
    found = draw(pipe) if is_compiled else eager(pipe, GATE)[0]
    assert relative_error(found, expected(reference)) < 1e-4


@pytest.mark.parametrize("how", ["another tensor", "written in place", "inference mode"])
def test_a_prompt_that_changes_after_the_gate_has_cross_attention_again(
    pipe: Any, how: str
) -> None:
    # Writes in place are not counted under inference mode.
    mode = torch.inference_mode() if how == "inference mode" else nullcontext()
    other = pipe.encode_prompt(["a lake", "a fox"], "cpu", 1, True, ["blurred"] * 2)
    text = torch.cat([other[1], other[0]])

    def change(_: Any, tensors: dict[str, Any]) -> None:
        if how == "another tensor":
            tensors["prompt_embeds"] = text.clone()
        else:
            tensors["prompt_embeds"].copy_(text)

    given = {
        **at(1, change),
        "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"],
        "num_inference_steps": 6,
    }
    before = {**given, **at(0, change)}
    # From the gate's step on, and in the third step of the gate's six.
    with mode:
        found, seen = eager(pipe, GATE, **before)
    assert reason_of(seen) == ""
    assert relative_error(found, expected(pipe, 3, **before)) < 1e-4
    late = {**given, **at(3, change)}
    with mode:
        found, seen = eager(pipe, GATE, **late)
    assert reason_of(seen) == CHANGED
    assert seen.gate is not None
    assert seen.gate.frozen == 1
    assert relative_error(found, expected(pipe, 3, **late)) > 1e-4


def test_the_first_picture_finds_the_kinds_of_both_parts(
    pipe: Any, make_session: NewSession
) -> None:
    session = make_session(build="never")
    compile_pipe(pipe, session=session, ignores=["vae"], guidance_steps=GATE)
    draw(pipe)
    found = [kind.key.entries["call"] for kind in session.kinds]
    assert sum("projected" in call for call in found) == 2
    assert sum("attended" in call for call in found) == 2


@torch.no_grad()
def test_with_deepcache_the_gates_step_is_a_full_call(pipe: Any) -> None:
    reference, steps, guided = models.sd15(), 12, 6
    adapter, calls = DiffusersUNet(reference.unet), iter(range(steps))
    own, feature = reference.unet.forward, Feature(4)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Every third one, the gate's step, and the first one after it.
        layers = adapter.full if next(calls) in (0, 3, 5, 6, 9) else adapter.shallow
        with layers(0, feature):
            return own(*args, **kwargs)

    reference.unet.forward = forward
    with plain_gate(reference, guided):
        by_hand = draw(reference, num_inference_steps=steps)
    enable_deepcache(pipe, 3)
    found, seen = eager(pipe, "gate:0.5", num_inference_steps=steps)
    assert counts(pipe) == {"full": 5, "shallow": 7}
    assert reason_of(seen) == ""
    assert relative_error(found, by_hand) < 1e-4


def test_deepcache_and_a_gate_together_have_cuda_graphs_of_their_own(
    make_session: NewSession,
) -> None:
    reference, pipe = models.sd15(), models.sd15()
    session, recorder = make_session(), FrozenRecorder()
    session.cuda_graphs = CudaGraphCache(recorder, limit=16)
    compile_pipe(pipe, session=session, ignores=["vae"], deepcache=3)
    enable_deepcache(reference, 3)
    by_hand, _ = eager(reference, "gate:0.5", num_inference_steps=12)
    for _ in range(6):
        found, seen = eager(pipe, "gate:0.5", num_inference_steps=12)
        assert relative_error(found, by_hand) < 1e-4
        assert reason_of(seen) == ""
    # Full and shallow, whole; the gate's step; full and shallow, frozen.
    assert len(session.cuda_graphs) == 5


def test_without_the_option_the_kinds_are_what_they_were(
    pipe: Any, make_session: NewSession
) -> None:
    session = make_session()
    compile_pipe(pipe, session=session, ignores=["vae"])
    draw(pipe)
    before = {kind.key.digest for kind in session.kinds}
    eager(pipe, INTERVAL)
    assert {kind.key.digest for kind in session.kinds} == before
    eager(pipe, GATE)
    more = [kind for kind in session.kinds if kind.key.digest not in before]
    assert {kind.label.partition(" ")[0] for kind in more} == {"BasicTransformerBlock"}
    widths = [kind for kind in session.kinds if kind.label.startswith("BasicTransformerBlock")]
    assert len(widths) == 2 * len(more)


def test_the_next_session_builds_nothing(make_session: NewSession, tmp_path: Path) -> None:
    for expected_builds in (True, False):
        pipe, session = models.sd15(seed=11), make_session(store=tmp_path / "store")
        compile_pipe(pipe, session=session, ignores=["vae"], guidance_steps=GATE)
        for height in (72, 64, 72):
            draw(pipe, height=height)
        assert (session.count("built") > 0) is expected_builds
        state = compiled_state(pipe)
        assert state is not None
        attended = [kind for kind in session.kinds if "attended" in kind.key.entries["call"]]
        assert len(attended) == 2
        assert all(kind.graph is not None for kind in attended)
