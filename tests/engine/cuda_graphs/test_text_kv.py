"""Keys and values of a prompt are computed once for a picture, and never used for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.forward_variants import ForwardVariant, set_variant
from onediff_ext.hosts.diffusers.blocks import TransformerFamily
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.session.session import Session
from tests.support.adapter_weights import lora_tensors
from tests.support.cuda_graph_steps import captured, inputs, settle
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.models import sd15

Step = dict[str, Any]


class CountedProjections:
    """Stands for `TransformerFamily.text_kv`, and counts."""

    def __init__(self) -> None:
        self.count, self._text_kv = 0, TransformerFamily.text_kv

    def __call__(self, family: Any, block: Any, *given: Any) -> Any:
        self.count += 1
        return self._text_kv(family, block, *given)


@pytest.fixture
def projections(monkeypatch: pytest.MonkeyPatch) -> CountedProjections:
    counted = CountedProjections()
    monkeypatch.setattr(
        TransformerFamily, "text_kv", lambda family, block, *given: counted(family, block, *given)
    )
    return counted


@pytest.fixture
def recorder() -> FrozenRecorder:
    return FrozenRecorder()


@pytest.fixture
def session(make_session: Callable[..., Session]) -> Session:
    return make_session(captures=False)


@pytest.fixture
def pipe(session: Session) -> Iterator[Any]:
    pipe = sd15(seed=3)
    compile_pipe(pipe, session=session, ignores=["vae"])
    with torch.no_grad():
        for _ in range(2):  # graphs are built after the first forward, and checked in the second
            pipe.unet(**inputs(pipe.unet))
        yield pipe
    undo_compile(pipe)


@pytest.fixture
def captured_pipe(pipe: Any, session: Session, recorder: FrozenRecorder) -> Any:
    undo_compile(pipe)
    session.cuda_graphs = CudaGraphCache(recorder, limit=3)
    compile_pipe(pipe, session=session, ignores=["vae"])
    settle(pipe)
    return pipe


def blocks(pipe: Any) -> int:
    return sum(type(module).__name__ == "BasicTransformerBlock" for module in pipe.unet.modules())


def next_step(step: Step, seed: int) -> Step:
    """Another latent with the same prompt."""
    return {**step, "sample": torch.randn(step["sample"].shape, generator=_generator(seed))}


def assert_right(pipe: Any, step: Step, rtol: float = 1e-4, atol: float = 1e-5) -> torch.Tensor:
    found = pipe.unet(**step).sample
    with compiled_state(pipe).components[0].paused():
        expected = pipe.unet(**step).sample
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    return found


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _other_prompt(pipe: Any, step: Step) -> None:
    step["encoder_hidden_states"] = -step["encoder_hidden_states"]


def _same_tensor_other_prompt(pipe: Any, step: Step) -> None:
    step["encoder_hidden_states"].neg_()


def _weight_in_place(pipe: Any, step: Step) -> None:
    for name, weight in pipe.unet.named_parameters():
        if "attn2.to_v" in name:
            weight.mul_(2)


def _weight_storage(pipe: Any, step: Step) -> None:
    for name, weight in pipe.unet.named_parameters():
        if "attn2.to_v" in name:
            weight.data = weight.data * 2


def _weight_parameter(pipe: Any, step: Step) -> None:
    for name, module in pipe.unet.named_modules():
        if name.endswith("attn2.to_v"):
            module.weight = torch.nn.Parameter(module.weight * 2, requires_grad=False)


def _lora(pipe: Any, step: Step) -> None:
    pipe.load_lora_weights(lora_tensors(pipe, text=False))


CHANGES = [
    _other_prompt,
    _same_tensor_other_prompt,
    _weight_in_place,
    _weight_storage,
    _weight_parameter,
    _lora,
]


def test_once_for_a_picture(pipe: Any, session: Session, projections: CountedProjections) -> None:
    step = inputs(pipe.unet, seed=5)
    for picture in range(1, 4):
        with session.picture():
            for seed in range(3):
                pipe.unet(**next_step(step, seed))
        assert projections.count == picture * blocks(pipe)
    for seed in range(2):  # where nobody tells of pictures, each forward may be another one
        pipe.unet(**next_step(step, seed))
    assert projections.count == 5 * blocks(pipe)
    assert session.fallbacks() == []


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_within_a_picture_is_seen(
    pipe: Any, session: Session, change: Callable[[Any, Step], None]
) -> None:
    step = inputs(pipe.unet, seed=5)
    with session.picture():
        before = [assert_right(pipe, next_step(step, seed)) for seed in range(2)]
        change(pipe, step)
        after = [assert_right(pipe, next_step(step, seed)) for seed in range(2)]
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(after, before, strict=True))


def test_autocast_may_change_within_a_picture(
    pipe: Any, session: Session, projections: CountedProjections
) -> None:
    step = inputs(pipe.unet, seed=5)

    def draw(autocast: bool) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            if autocast:
                assert_right(pipe, step, rtol=0.05, atol=0.05)
            else:
                assert_right(pipe, step)

    for _ in range(2):  # graphs of both kinds are built, and checked
        for autocast in (True, False):
            draw(autocast)
    projections.count = 0
    with session.picture():
        for autocast in (False, True, True, False):
            draw(autocast)
    assert projections.count == 3 * blocks(pipe)
    assert session.fallbacks() == []


def test_a_change_without_a_trace_is_seen_with_the_next_picture(
    pipe: Any, session: Session
) -> None:
    step = inputs(pipe.unet, seed=5)
    for _ in range(2):
        with session.picture():
            assert_right(pipe, step)
        for name, weight in pipe.unet.named_parameters():
            if "attn2.to_v" in name:
                weight.data.mul_(2)


def test_under_inference_mode_nothing_is_kept(
    pipe: Any, session: Session, projections: CountedProjections
) -> None:
    with torch.inference_mode(), session.picture():
        step = inputs(pipe.unet, seed=5)
        step["encoder_hidden_states"] = step["encoder_hidden_states"].clone()
        for _ in range(2):
            assert_right(pipe, step)
            step["encoder_hidden_states"].neg_()
    assert projections.count == 2 * blocks(pipe)


def test_all_sizes_share_one_recording_which_a_picture_replays_once(
    captured_pipe: Any, session: Session, recorder: FrozenRecorder, projections: CountedProjections
) -> None:
    pipe, sizes = captured_pipe, ({"height": 8, "width": 12}, {"height": 17, "width": 9})
    for size in sizes:
        settle(pipe, **size)
    (part,) = recorder.prompts
    assert recorder.recorded == 2
    before, projections.count = part.replays, 0
    prompt = inputs(pipe.unet, seed=7)["encoder_hidden_states"]
    for picture in range(1, 3):
        with session.picture():
            for seed in range(3):
                for size in sizes:
                    step = inputs(pipe.unet, seed=seed, **size)
                    pipe.unet(**{**step, "encoder_hidden_states": prompt})
                    assert captured(pipe).reason == ""
        assert part.replays == before + picture
    assert projections.count == 0  # by replays, which run no Python


@pytest.mark.parametrize("change", CHANGES)
def test_a_capture_sees_a_change_within_a_picture(
    captured_pipe: Any, session: Session, change: Callable[[Any, Step], None]
) -> None:
    step = inputs(captured_pipe.unet, seed=5)
    with session.picture():
        before = [assert_right(captured_pipe, next_step(step, seed)) for seed in range(2)]
        change(captured_pipe, step)
        after = [assert_right(captured_pipe, next_step(step, seed)) for seed in range(4)]
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(after, before, strict=False))


def test_a_recording_is_made_again_with_the_model(
    captured_pipe: Any, recorder: FrozenRecorder
) -> None:
    _weight_storage(captured_pipe, {})
    settle(captured_pipe)
    assert len(recorder.prompts) == 2
    assert_right(captured_pipe, inputs(captured_pipe.unet, seed=9))


def test_its_memory_goes_with_the_captures(
    captured_pipe: Any, session: Session, recorder: FrozenRecorder
) -> None:
    assert session.cuda_graphs.size_bytes == 2 * recorder.prompts[0].size_bytes
    session.cuda_graphs.drop_all("a test")
    assert len(captured(captured_pipe)._recorder._text_kv_graphs) == 0
    settle(captured_pipe)
    assert len(recorder.prompts) == 2


@torch.no_grad()
def test_what_was_recorded_later_outlasts_a_replay_of_what_was_recorded_before(
    captured_pipe: Any, session: Session, recorder: FrozenRecorder
) -> None:
    """Two forwards take turns within one picture, with one prompt: DeepCache's, or two models'."""
    unet, forward = captured_pipe.unet, captured(captured_pipe)
    step = inputs(unet, seed=4)
    with session.picture():
        for turn in range(12):
            set_variant(unet, ForwardVariant(("deep", "shallow")[turn % 2], keeps=()))
            assert_right(captured_pipe, next_step(step, turn))
            assert turn < 8 or forward.reason == ""
    set_variant(unet, None)
    assert len(recorder.prompts) == 3
