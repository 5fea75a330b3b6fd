"""Embedders and context refiners of transformers run once a picture, in CUDA graphs' place too."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.prompt_work import PromptWork
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.hosts.diffusers.prompt_recipes import Embedding
from onediff_ext.hosts.diffusers.transformer_probe import transformer_inputs
from onediff_ext.session.session import Session
from tests.support import transformer_models as models
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.transformer_draws import draw
from tests.support.transformer_models import MODELS

SIZE = (64, 96, 40, 1)
STEPS = 4
# Calls of the model in one step: guidance is another call, or in the same one.
CALLS = {"sd3": 1, "flux": 1, "chroma": 2, "flux2": 2, "qwen_image": 2, "z_image": 1, "lumina2": 2}


class Pair(SimpleNamespace):
    """A pipeline with recordings, and its eager twin.

    Args:
        name: Of the model.
        pipe, twin: The pipelines.
        recorder: Records the CUDA graphs of the first.
    """

    @property
    def component(self) -> Any:
        return compiled_state(self.pipe).components[0]

    @property
    def work(self) -> Any:
        """What does the prompt's part."""
        return self.component._forward.prompt_work

    def agree(self, seed: int = 0, **options: Any) -> torch.Tensor:
        """Draw with both, and compare."""
        tokens, batch = SIZE[2:]
        options = {"num_inference_steps": STEPS, **options}
        found, expected = (
            draw(
                pipe,
                self.name,
                SIZE,
                **MODELS[self.name].embeddings(tokens, batch, seed),
                **options,
            )
            for pipe in (self.pipe, self.twin)
        )
        assert relative_error(found, expected) < 1e-4
        return found


@pytest.fixture
def pair(make_session: Callable[..., Session]) -> Any:
    """Make a pair of a model."""
    made = []

    def make(name: str) -> Pair:
        pipe, twin, session = MODELS[name].make(), MODELS[name].make(), make_session()
        recorder = FrozenRecorder()
        session.cuda_graphs = CudaGraphCache(recorder, limit=8)
        compile_pipe(pipe, session=session, ignores=("vae",))
        made.append(pipe)
        return Pair(name=name, pipe=pipe, twin=twin, recorder=recorder)

    yield make
    for pipe in made:
        undo_compile(pipe)


@pytest.mark.parametrize("name", MODELS)
def test_once_a_picture(name: str, pair: Callable[[str], Pair]) -> None:
    both = pair(name)
    both.agree()  # the first one looks at the model's code
    drawn = []
    for number in range(1, 3):
        before = both.work.computed
        drawn.append(both.agree(seed=number))
        assert both.work.computed - before == CALLS[name]
    assert relative_error(drawn[-1], drawn[-2]) > 1e-3  # each prompt has its own picture
    assert both.work.refusal_reason == ""
    if name != "lumina2":  # reads its mask on the CPU
        assert both.component.captured.reason == ""
        assert both.component.captured.replayed


@pytest.mark.parametrize("name", MODELS)
def test_once_a_picture_of_a_users_own_loop(name: str, pair: Callable[[str], Pair]) -> None:
    """Nobody announces its pictures: the elements of a schedule tell them apart."""
    both = pair(name)
    model = both.pipe.transformer
    generator = torch.Generator().manual_seed(0)
    noise = transformer_inputs(model, generator, pictures=1, height_px=64, width_px=96)
    assert noise is not None
    timestep = next(key for key in ("timestep", "t") if key in noise)

    def picture() -> int:
        before = both.work.computed
        with torch.no_grad():
            for t in torch.linspace(0.9, 0.1, STEPS):
                model(**{**noise, timestep: t.expand(noise[timestep].shape)})
        return int(both.work.computed - before)

    picture()  # looks at the model's code, and compares
    assert [picture(), picture()] == [1, 1]


@pytest.mark.parametrize("name", ["z_image", "lumina2"])
def test_refiners_run_once_a_picture(name: str, pair: Callable[[str], Pair]) -> None:
    both = pair(name)
    both.agree(seed=1)
    blocks = set(both.pipe.transformer.context_refiner)
    (runner,) = [runner for runner in both.component.runners if runner.block in blocks]
    before = runner.used.calls
    both.agree(seed=2)
    assert runner.used.calls - before == CALLS[name]
    assert runner.eager_reason is None


def test_a_forward_that_is_compared_is_not_recorded(pair: Callable[[str], Pair]) -> None:
    """Those that follow have the prompt's part done: its CUDA graph would never be replayed."""
    both = pair("flux")
    both.agree()
    assert both.recorder.recorded == 1
    for each in (both.pipe, both.twin):  # the embedder changes: a comparison again
        state = models.lora_state(each.transformer, ("context_embedder",))
        each.load_lora_weights(state, adapter_name="a")
    for _ in range(2):
        both.agree()
        assert both.component.captured.replayed
    assert both.recorder.recorded == 2


def test_a_forward_whose_graphs_are_judged_is_not_compared(
    pair: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns eager's results. Graphs in 8 bits differ from them by more than is allowed."""
    both = pair("z_image")
    call, verify, judged, compared_with = PromptWork.__call__, PromptWork._verify, [], []

    def noted_call(work: PromptWork, *args: Any) -> Any:
        before = work._judged_calls()
        judged.append(0)
        output = call(work, *args)
        judged[-1] = work._judged_calls() - before
        return output

    def noted_verify(work: PromptWork, *args: Any) -> None:
        compared_with.append(len(judged) - 1)
        verify(work, *args)

    monkeypatch.setattr(PromptWork, "__call__", noted_call)
    monkeypatch.setattr(PromptWork, "_verify", noted_verify)
    both.agree()
    both.agree()
    assert any(judged)
    assert compared_with
    assert not any(judged[number] for number in compared_with)
    assert both.work.computed


def test_changes_within_a_picture_count(pair: Callable[[str], Pair]) -> None:
    """A prompt that is written in place, a LoRA's weight, a weight, and a layer of one's own."""
    both = pair("flux")
    both.agree()
    for each in (both.pipe, both.twin):
        state = models.lora_state(each.transformer, ("context_embedder", "attn.to_q"))
        each.load_lora_weights(state, adapter_name="a")
    plain = both.agree()

    def fade(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            kwargs["prompt_embeds"].mul_(0.1)
        return kwargs

    def weigh(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        pipe.set_adapters("a", 0.2 * step)
        return kwargs

    def replace(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        layer = pipe.transformer.context_embedder.base_layer
        layer.weight.mul_(0.5)
        if step == 2:
            layer.weight = torch.nn.Parameter(layer.weight * 2, requires_grad=False)
        return kwargs

    for change in (fade, weigh, replace):
        changed = both.agree(
            callback_on_step_end=change, callback_on_step_end_tensor_inputs=["prompt_embeds"]
        )
        assert relative_error(changed, plain) > 1e-4
        plain = both.agree()
    for each in (both.pipe, both.twin):
        each.transformer.context_embedder.base_layer.weight.data.mul_(3)  # counts no version
    assert relative_error(both.agree(), plain) > 1e-4


@pytest.mark.parametrize(
    ("written", "between"), [("weight", None), ("prompt", None), ("weight", {"scale": 1.0})]
)
def test_other_numbers_where_earlier_ones_lay(
    written: str, between: dict[str, float] | None, pair: Callable[[str], Pair]
) -> None:
    """Two buffers in turn: each second step has address and version of the one before last.

    With attention arguments, the steps in between have all of their work inside.
    """
    both = pair("flux")
    both.agree()
    both.agree()
    buffers: list[torch.Tensor] = []

    def change(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        weight = pipe.transformer.context_embedder.weight
        tensor = weight if written == "weight" else kwargs["prompt_embeds"]
        if step == 0:
            buffers[:] = tensor.data, tensor.data.clone()
        following = buffers[(step + 1) % 2]
        following.copy_(tensor.data * 1.3)
        tensor.data = following
        pipe._joint_attention_kwargs = None if step % 2 else between
        return kwargs

    both.agree(callback_on_step_end=change, callback_on_step_end_tensor_inputs=["prompt_embeds"])


@pytest.mark.parametrize("name", ["z_image", "lumina2"])
def test_a_refiners_table_that_is_written_within_a_picture(
    name: str, pair: Callable[[str], Pair]
) -> None:
    both = pair(name)
    both.agree()
    plain = both.agree()

    def turn(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        table = pipe.transformer.rope_embedder.freqs_cis[0]  # too long to be compared by content
        table.copy_(table**1.3)
        return kwargs

    assert relative_error(both.agree(callback_on_step_end=turn), plain) > 1e-3


def test_an_embedder_whose_weight_wraps_others(pair: Callable[[str], Pair]) -> None:
    """torch moves such a model by exchanging tensors, which weak references would forbid."""
    both = pair("flux")
    for each in (both.pipe, both.twin):
        layer = each.transformer.context_embedder
        weight = TwoTensor(layer.weight.detach().clone(), layer.weight.detach().clone())
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    both.agree()
    before = both.agree()
    for each in (both.pipe, both.twin):
        weight = each.transformer.context_embedder.weight
        weight.a, weight.b = 2 * weight.a, 2 * weight.b
    assert relative_error(both.agree(), before) > 1e-4
    for each in (both.pipe, both.twin):
        each.transformer.to(torch.float64).to(torch.float32)
    both.agree()


def test_a_hook_on_an_embedder_runs_at_each_step(pair: Callable[[str], Pair]) -> None:
    both, seen = pair("flux"), []
    both.agree()
    computed = both.work.computed
    handles = [
        each.transformer.context_embedder.register_forward_hook(
            lambda layer, args, output: seen.append(layer) or 0.5 * output
        )
        for each in (both.pipe, both.twin)
    ]
    both.agree()
    assert both.work.computed == computed
    assert seen.count(both.pipe.transformer.context_embedder) == STEPS
    for handle in handles:
        handle.remove()
    both.agree()
    assert both.work.computed == computed + 1


@pytest.mark.parametrize("helper", ["time_caption_embed", "rope_embedder"])
def test_a_hook_beside_the_layers(helper: str, pair: Callable[[str], Pair]) -> None:
    """Lumina 2's prompt reaches its embedder through a module, and its refiner has a table."""
    both = pair("lumina2")
    both.agree()
    computed, seen = both.work.computed, []

    def scaled(layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        seen.append(layer)
        return (*args[:-1], args[-1] * 1.3) if helper == "time_caption_embed" else args

    layers = [each.transformer.get_submodule(helper) for each in (both.pipe, both.twin)]
    handles = [layer.register_forward_pre_hook(scaled) for layer in layers]
    both.agree()
    assert both.work.computed == computed
    assert seen.count(layers[0]) == seen.count(layers[1])
    for handle in handles:
        handle.remove()
    both.agree()
    assert both.work.computed == computed + CALLS["lumina2"]


class Counting:
    """An attention processor of a refiner whose result depends on how often it was called."""

    def __init__(self, own: Any) -> None:
        self._own, self.calls = own, 0

    def __call__(self, attention: Any, states: torch.Tensor, **others: Any) -> torch.Tensor:
        self.calls += 1
        output: torch.Tensor = self._own(attention, states, **others)
        return output + 0.3 * self.calls * output.flip(1)


@pytest.mark.parametrize("step", [None, 1])
def test_a_processor_of_a_refiner_that_counts(
    step: int | None, pair: Callable[[str], Pair]
) -> None:
    """Nothing is computed ahead by it, not even once, before or within a picture."""
    both = pair("lumina2")
    both.agree()
    both.agree()

    def install(pipe: Any, now: int | None, *others: Any) -> Any:
        if now == step:
            layer = pipe.transformer.context_refiner[0].attn
            layer.processor = Counting(layer.processor)
        return others[-1] if others else None

    for each in (both.pipe, both.twin):
        install(each, None)
    both.agree(callback_on_step_end=install)
    both.agree()


def test_a_class_that_is_patched_under_a_hook_of_an_embedder(
    pair: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no OneDiff is, the hook keeps the function that the class had."""
    both = pair("flux")
    both.agree()
    layers = [each.transformer.context_embedder for each in (both.pipe, both.twin)]
    for layer in layers:
        layer.forward = around(layer.forward)
    both.agree()
    forward = torch.nn.Linear.forward

    def patched(layer: Any, x: torch.Tensor) -> torch.Tensor:
        found = forward(layer, x)
        return found.flip(-1) if layer in layers else found

    monkeypatch.setattr(torch.nn.Linear, "forward", patched)
    both.agree()


def around(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: forward(*args, **kwargs) * 1.1


def test_models_that_share_an_embedder(pair: Callable[[str], Pair]) -> None:
    """One of them does its prompt's part ahead; the other takes over when that one is undone."""
    first, second = pair("flux"), pair("flux")
    layer = second.pipe.transformer.context_embedder = first.pipe.transformer.context_embedder
    first.agree()
    forward = vars(layer)["forward"]
    for seed in range(1, 3):
        second.agree(seed)
        first.agree(seed)
        assert vars(layer)["forward"] is forward  # nothing piles up on the layer
    assert (first.work.computed, second.work.computed) == (3, 0)
    undo_compile(first.pipe)
    second.agree()
    assert second.work.computed == 1
    undo_compile(second.pipe)
    assert "forward" not in vars(layer)


def test_what_differs_from_the_whole_forward_is_not_used(
    pair: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model of another version of diffusers may."""
    own = Embedding.compute
    monkeypatch.setattr(Embedding, "compute", lambda *args: 1.01 * own(*args))
    both = pair("flux")
    both.agree()
    computed = both.work.computed
    assert "differs" in both.work.refusal_reason
    both.agree(seed=1)
    assert both.work.computed == computed
    assert "forward" not in vars(both.pipe.transformer.context_embedder)
