"""When a gate freezes nothing, and what is refused; threads and pictures that share a UNet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from onediff_ext.core.errors import OptionError
from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.guidance import attention_gate
from onediff_ext.engine.guidance.attention_gate import (
    CHANGED,
    CHANGED_ATTENTION,
    NOT_KEPT,
    AttentionOutputs,
)
from onediff_ext.engine.guidance.guided_forward import GuidedCall, GuidedForward
from onediff_ext.engine.half_of_batch import half_of_batch
from onediff_ext.engine.running.gated_attention import FROZEN, GatedAttention, GateMode, KeptOutput
from onediff_ext.hosts.diffusers.compile import compile_pipe
from onediff_ext.hosts.diffusers.guidance_steps import guidance_steps_for
from onediff_ext.session.session import Session
from tests.engine.cuda_graphs.test_oom_fallback import FullMemory
from tests.hosts.diffusers.gate_draws import GATE, GUIDED, INTERVAL, at, expected, reason_of
from tests.hosts.diffusers.test_chosen_guidance_steps import (
    draw,
    eager,
    sibling,
    texts_of,
)
from tests.support import models, transformer_models
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder

NewSession = Callable[..., Session]


@pytest.fixture
def pipe() -> Any:
    return models.sd15()


def test_without_the_gates_step_guidance_alone_is_left_out(pipe: Any) -> None:
    def skip(of: Any, _: Any) -> None:
        of.unet.is_cache_enabled = step_of(of) == GUIDED - 2

    def step_of(of: Any) -> int:
        return int(of.scheduler.step_index) - 1

    given = {
        "callback_on_step_end": lambda of, index, _, tensors: (skip(of, tensors), tensors)[1],
    }
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    interval, _ = eager(pipe, INTERVAL)
    found, seen = eager(pipe, GATE, **given)
    assert torch.equal(found, interval)
    assert seen.counts == {"guidance": 1, "whole": 1, "prompt": 2}
    assert reason_of(seen) == NOT_KEPT


def test_processors_that_are_not_known_leave_guidance_alone_out(
    pipe: Any, make_session: NewSession
) -> None:
    class Counting(diffusers.models.attention_processor.AttnProcessor2_0):  # type: ignore[misc]
        pass

    pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2.set_processor(Counting())
    interval, _ = eager(pipe, INTERVAL)
    found, seen = eager(pipe, GATE)
    assert torch.equal(found, interval)
    assert "Counting is not known" in reason_of(seen)
    session = make_session()
    compile_pipe(pipe, session=session, ignores=["vae"], guidance_steps=GATE)
    draw(pipe)
    told = {each.what: each.reason for each in session.fallbacks()}
    assert "Counting is not known" in told["frozen cross-attention"]


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_layers_that_an_extension_changes_leave_guidance_alone_out(pipe: Any, how: str) -> None:
    layer = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2
    if how == "hook":
        layer.register_forward_hook(lambda *_: None)
    else:
        own = layer.forward
        layer.forward = lambda *args, **kwargs: own(*args, **kwargs)
    interval, _ = eager(pipe, INTERVAL)
    found, seen = eager(pipe, GATE)
    assert torch.equal(found, interval)
    assert reason_of(seen) == CHANGED_ATTENTION


def test_transformers_are_refused() -> None:
    pipe = transformer_models.sd3()
    with (
        pytest.raises(OptionError, match="no cross-attention") as refused,
        guidance_steps_for(pipe, GuidanceOptions.parse(GATE)),
    ):
        pass
    assert "interval:0-0.5" in refused.value.hint


def test_a_picture_within_a_picture_ends_the_frozen_cross_attention(pipe: Any) -> None:
    previews = sibling(pipe)
    previews.scheduler = models.scheduler()
    whole = draw(previews)
    by_hand = expected(previews, prompt=["a lake", "a fox"])
    inner: list[torch.Tensor] = []

    def preview(_: Any, __: Any) -> None:
        inner.append(draw(previews))  # without a gate: the frozen outputs stay
        inner.append(eager(previews, GATE, prompt=["a lake", "a fox"])[0])

    alone, _ = eager(pipe, GATE)
    found, seen = eager(pipe, GATE, **at(2, preview))
    assert torch.equal(inner[0], whole)
    assert relative_error(inner[1], by_hand) < 1e-4
    assert reason_of(seen) == CHANGED
    assert seen.gate is not None
    assert seen.gate.frozen == 1
    assert relative_error(found, alone) < 0.1
    found, _ = eager(pipe, GATE, **at(2, lambda *_: inner.append(draw(previews))))
    assert torch.equal(found, alone)


def test_threads_that_share_a_unet_draw_their_own_pictures(
    pipe: Any, make_session: NewSession
) -> None:
    names = [GATE, "off", INTERVAL, "off"]
    pipes, texts = [sibling(pipe) for _ in names], texts_of(pipe)
    for each in pipes:
        each.scheduler = models.scheduler()
    options = [GuidanceOptions.parse(name) for name in names]

    def one(number: int) -> torch.Tensor:
        with guidance_steps_for(pipes[number], options[number]):
            return draw(pipes[number], **texts)

    drawn = [one(number) for number in range(len(names))]
    session = make_session()
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=8)
    compile_pipe(pipe, session=session, ignores=["vae"])
    found: dict[int, torch.Tensor] = {}
    for _ in range(3):
        threads = [
            threading.Thread(target=lambda n=n: found.update({n: one(n)}))
            for n in range(len(names))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, latents in enumerate(drawn):
            assert relative_error(found[number], latents) < 1e-4


def test_other_threads_wait_for_a_call_with_frozen_cross_attention(pipe: Any) -> None:
    given = models.unet_inputs(pipe.unet, 1, 9, 13)
    waiting: list[threading.Thread] = []

    @torch.no_grad()
    def other() -> None:
        pipe.unet(**given)

    def look(*_: Any) -> None:
        shared = attention_gate._models[pipe.unet]
        if shared.mode.now == FROZEN and not waiting:
            waiting.append(threading.Thread(target=other))
            waiting[0].start()
            waiting[0].join(0.2)
            assert waiting[0].is_alive()

    handle = pipe.unet.conv_in.register_forward_hook(look)
    eager(pipe, GATE)
    handle.remove()
    waiting[0].join(60)
    assert not waiting[0].is_alive()


@pytest.mark.parametrize("pictures", [2, 3])
def test_short_of_memory_halves_of_the_batch_draw_the_same(
    pipe: Any, make_session: NewSession, pictures: int
) -> None:
    # Activations are larger than weights.
    given = {
        "height": 144, "width": 208, "prompt": ["a cat", "a lake", "a fox"][:pictures],
        "negative_prompt": ["blurred"] * pictures,
    }  # fmt: skip
    numbers = 32 * 18 * 26  # of one picture
    by_hand = expected(models.sd15(), **given)
    session = make_session()
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=8)
    compile_pipe(pipe, session=session, ignores=["vae"])
    for _ in range(2):
        eager(pipe, GATE, **given)
    kind = next(kind for kind in session.kinds if kind.label.startswith("ResnetBlock2D 32"))
    whole = kind.graph
    assert whole is not None
    error = torch.OutOfMemoryError("CUDA out of memory.")

    def full(batch: int) -> FullMemory:
        session.cuda_graphs.drop_all("the test begins")
        kind.graph = FullMemory(whole, batch * numbers, error)
        return kind.graph

    before = full(pictures)  # a batch with guidance is too large
    found, seen = eager(pipe, GATE, **given)
    assert before.refused
    assert reason_of(seen) == ""
    assert relative_error(found, by_hand) < 1e-4
    kind.graph, after = whole, list[FullMemory]()
    halved = (pictures + 1) // 2
    found, seen = eager(
        pipe, GATE, **given, **at(GUIDED - 1, lambda *_: after.append(full(halved)))
    )
    assert after[0].refused
    assert set(after[0].batches) == {pictures // 2, halved}
    assert relative_error(found, by_hand) < 1e-4


def test_the_parts_of_a_unet_that_another_extension_runs_are_left_alone(
    pipe: Any, make_session: NewSession
) -> None:
    interval, _ = eager(pipe, INTERVAL)
    own = pipe.unet.forward
    pipe.unet.forward = lambda *args, **kwargs: own(*args, **kwargs)
    session = make_session()
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=8)
    compile_pipe(pipe, session=session, ignores=["vae"])
    for _ in range(3):
        found, seen = eager(pipe, GATE)
        assert reason_of(seen) == attention_gate.IN_PARTS
        assert relative_error(found, interval) < 1e-4


def test_outputs_count_only_if_all_were_written() -> None:
    outputs = AttentionOutputs(1, 2)
    outputs.begin(self_ := object())
    outputs.note_replay()
    assert not outputs.are_whole()  # nothing was recorded before
    outputs.begin(self_)
    outputs.each[0].store(torch.ones(2, 3, 4))
    assert not outputs.are_whole()
    outputs.each[1].store(torch.ones(1, 3, 4))  # another batch
    assert not outputs.are_whole()
    outputs.each[1].store(torch.ones(2, 3, 4))
    assert outputs.are_whole()
    outputs.begin(self_)
    assert not outputs.are_whole()  # somebody skipped the forward
    for kept in outputs.each:
        kept.store(torch.ones(2, 3, 4))
    assert outputs.are_whole()
    outputs.begin(self_)
    outputs.note_replay()
    assert outputs.are_whole()
    outputs.begin(self_)
    outputs.each[0].store(torch.ones(2, 5, 4))  # another shape
    assert not outputs.are_whole()


def test_an_output_is_the_mean_of_both_halves_at_one_address() -> None:
    kept = KeptOutput(2)
    for scale in (1, 2):
        output = torch.arange(24.0).view(4, 2, 3) * scale
        kept.store(output)
        assert kept.tensor is not None
        assert torch.equal(kept.tensor, (output[:2] + output[2:]) / 2)
    with torch.inference_mode():
        kept.store(torch.ones(4, 2, 3))
    kept.store(torch.ones(4, 2, 3))
    first = kept.tensor
    kept.store(torch.zeros(4, 2, 3))
    assert kept.tensor is first


@pytest.mark.parametrize("other", [(2, 13, 9), (4, 9, 13)])
@torch.no_grad()
def test_outputs_do_not_serve_another_size_or_batch(pipe: Any, other: tuple[int, int, int]) -> None:
    steps = iter(range(9))

    def read(_: Any, kwargs: Any) -> GuidedCall:
        return GuidedCall(next(steps), 9, kwargs["sample"])

    forward = GuidedForward(pipe.unet, GuidanceOptions.parse("gate:0.1"), read)
    with forward.drawing():
        for size in ((2, 9, 13), (2, 9, 13), other, (2, 9, 13)):
            pipe.unet(**models.unet_inputs(pipe.unet, *size))
    assert forward.gate is not None
    assert (forward.gate.frozen, forward.gate.reason) == (1, CHANGED)


def test_a_unet_that_has_lost_a_layer_has_outputs_of_its_own(pipe: Any) -> None:
    kept: list[Any] = []

    def hold(of: Any, _: Any) -> None:
        kept.extend(attention_gate._models[of.unet].alive.values())  # as a CUDA graph does

    eager(pipe, GATE, **at(GUIDED, hold))
    assert len(kept) == 1
    pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2 = None
    found, seen = eager(pipe, GATE)
    assert reason_of(seen) == ""
    assert relative_error(found, expected(pipe)) < 1e-4


def test_an_output_in_halves_is_the_same() -> None:
    output = torch.randn(4, 5, 6, dtype=torch.float16)
    whole, halves = KeptOutput(2), KeptOutput(2)
    whole.store(output)
    for number, half in enumerate(output.chunk(2)):
        with half_of_batch(number):
            halves.store(half)
            assert halves.is_stored == bool(number)
            halves.store(output)  # not one of a half
    assert whole.tensor is not None
    assert halves.tensor is not None
    assert torch.equal(whole.tensor, halves.tensor)


def test_inputs_of_another_size_are_attended(pipe: Any) -> None:
    block = pipe.unet.mid_block.attentions[0].transformer_blocks[0]
    mode = GateMode()
    gated = GatedAttention(block, mode)
    gated.kept = KeptOutput(1)
    gated.kept.store(torch.ones(2, 6, block.dim))
    with mode.set(FROZEN):
        assert gated.frozen(torch.zeros(1, 6, block.dim)) is gated.kept.tensor
        assert gated.frozen(torch.zeros(2, 6, block.dim)) is None
        assert gated.frozen(torch.zeros(1, 4, block.dim)) is None
    assert gated.frozen(torch.zeros(1, 6, block.dim)) is None
