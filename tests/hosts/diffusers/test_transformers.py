"""Transformer pipelines (DiT) through graphs draw eager's pictures, whatever the size."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    attention_backend,
)

from onediff_ext.building.worker.trial import try_out
from onediff_ext.core.components import ComponentId, Role
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.export.exporter import load_program
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.hosts.diffusers.compile_module import compile_module
from onediff_ext.hosts.diffusers.warmup import pipe_warm_up
from onediff_ext.session.session import Session
from tests.support import quick_builds, transformer_models
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.models import build
from tests.support.transformer_draws import SIZES, draw, without_guidance
from tests.support.transformer_models import MODELS

MakeSession = Callable[..., Session]

# A prompt's mask is an argument of its own, and whether it is there is part of a kind.
_MASKED = ("chroma", "qwen_image", "z_image", "lumina2")


@pytest.fixture(params=list(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def transformer_of(pipe: Any) -> Any:
    """The component of the pipeline's transformer."""
    by_identity = {c.identity: c for c in compiled_state(pipe).components}
    return by_identity[ComponentId(Role.TRANSFORMER)]


def test_any_size_batch_and_prompt(name: str, make_session: MakeSession) -> None:
    pipe, twin, session = MODELS[name].make(), MODELS[name].make(), make_session()
    compile_pipe(pipe, session=session, ignores=("vae",))
    for size in SIZES[:3]:  # with masks and without
        draw(pipe, name, size)
    kinds = list(session.kinds)
    for number, size in enumerate(SIZES):
        options = {"num_inference_steps": 1, **(without_guidance(name) if number % 2 else {})}
        found = draw(pipe, name, size, **options)
        assert relative_error(found, draw(twin, name, size, **options)) < 1e-4, size
    assert session.kinds == kinds
    assert {kind.state for kind in kinds} == {KindState.READY}
    assert all(runner.eager_reason is None for runner in transformer_of(pipe).runners)
    assert not session.status().reasons
    undo_compile(pipe)


def test_a_second_session_builds_nothing(name: str, make_session: MakeSession) -> None:
    for number in range(2):
        pipe, session = MODELS[name].make(seed=number), make_session()
        compile_pipe(pipe, session=session, ignores=("vae",))
        for _ in range(3):
            draw(pipe, name, SIZES[0])
        assert transformer_of(pipe).kinds()
        undo_compile(pipe)
    assert session.count("built") == 0
    assert session.count("loaded") == len(session.kinds)


def test_loras_need_no_other_graph(name: str, make_session: MakeSession) -> None:
    pipe, twin, session = MODELS[name].make(), MODELS[name].make(), make_session()
    compile_pipe(pipe, session=session, ignores=("vae",))
    size = SIZES[4]
    plain = draw(pipe, name, size)
    kinds, seen = list(session.kinds), [plain]

    def agree() -> None:
        found = draw(pipe, name, size)
        assert relative_error(found, draw(twin, name, size)) < 1e-4
        assert all(runner.eager_reason is None for runner in transformer_of(pipe).runners)
        seen.append(found)

    for number, adapter in enumerate(("a", "b")):
        for each in (pipe, twin):
            layers = MODELS[name].lora_layers
            state = transformer_models.lora_state(each.transformer, layers, seed=number)
            each.load_lora_weights(state, adapter_name=adapter)
        agree()
    for change in (
        lambda p: p.set_adapters(["a", "b"], [0.3, -0.7]),
        lambda p: p.set_adapters("b", 0.5),
        lambda p: p.disable_lora(),
    ):
        change(pipe)
        change(twin)
        agree()
    assert torch.equal(seen[-1], plain)
    # Each LoRA and each weight draws another picture.
    assert all(relative_error(a, b) > 1e-3 for a, b in itertools.pairwise(seen))
    assert session.kinds == kinds
    undo_compile(pipe)


def test_a_transformer_by_itself(make_session: MakeSession) -> None:
    pipe, twin, session = transformer_models.sd3(), transformer_models.sd3(), make_session()
    pipe.transformer = compile_module(pipe.transformer, session=session)
    for _ in range(3):
        found = draw(pipe, "sd3", SIZES[4])
    assert relative_error(found, draw(twin, "sd3", SIZES[4])) < 1e-4
    (component,) = compiled_state(pipe.transformer).components
    assert component.role is Role.TRANSFORMER
    assert all(runner.eager_reason is None for runner in component.runners)
    undo_compile(pipe.transformer)


NATIVE = AttentionBackendName.NATIVE


class Halved(diffusers.models.attention_processor.JointAttnProcessor2_0):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        image, text = super().__call__(*args, **kwargs)
        return 0.5 * image, text


def test_what_no_graph_expects_runs_eager_with_a_reason(make_session: MakeSession) -> None:
    pipe, twin, session = transformer_models.flux(), transformer_models.flux(), make_session()
    compile_pipe(pipe, session=session, ignores=("vae",))
    size = SIZES[4]
    draw(pipe, "flux", size)
    runner = transformer_of(pipe).runners[0]
    assert runner.eager_reason is None

    with attention_backend("_native_math"):
        assert relative_error(draw(pipe, "flux", size), draw(twin, "flux", size)) < 1e-4
        assert runner.eager_reason == "attention runs with the backend _native_math"
    with attention_backend("native"):  # diffusers changes the active one as well
        pipe.transformer.set_attention_backend("_native_math")
    assert relative_error(draw(pipe, "flux", size), draw(twin, "flux", size)) < 1e-4
    assert runner.eager_reason == "attention runs with the backend _native_math"
    pipe.transformer.reset_attention_backend()
    draw(pipe, "flux", size)
    draw(pipe, "flux", size)
    assert runner.eager_reason is None
    undo_compile(pipe)


def weaker(query: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    return _AttentionBackendRegistry._backends[NATIVE](0.3 * query, *others, **options)


def exchange_function(patch: pytest.MonkeyPatch) -> None:
    own = _AttentionBackendRegistry._backends[NATIVE]
    patch.setitem(
        _AttentionBackendRegistry._backends,
        NATIVE,
        lambda query, *others, **options: own(0.3 * query, *others, **options),
    )


def exchange_lookup(patch: pytest.MonkeyPatch) -> None:
    found = classmethod(lambda cls: (NATIVE, weaker))
    patch.setattr(_AttentionBackendRegistry, "get_active_backend", found)


def exchange_code(patch: pytest.MonkeyPatch) -> None:
    own = _AttentionBackendRegistry._backends[NATIVE]

    def nothing(query: Any, key: Any, value: Any, *others: Any, **options: Any) -> torch.Tensor:
        return query.new_zeros(query.shape)

    patch.setattr(own, "__code__", nothing.__code__)


@pytest.mark.parametrize("change", [exchange_function, exchange_lookup, exchange_code])
def test_another_function_as_the_native_attention_runs_eager(
    change: Callable[[pytest.MonkeyPatch], None],
    make_session: MakeSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, twin, session = transformer_models.flux(), transformer_models.flux(), make_session()
    compile_pipe(pipe, session=session, ignores=("vae",))
    size = SIZES[4]
    plain = draw(pipe, "flux", size)
    with monkeypatch.context() as patch:
        change(patch)
        found, expected = draw(pipe, "flux", size), draw(twin, "flux", size)
        assert relative_error(found, expected) < 1e-4
        assert relative_error(expected, plain) > 1e-3
        reasons = {runner.eager_reason for runner in transformer_of(pipe).runners}
        assert reasons == {"attention runs with the backend native, as another extension has it"}
    draw(pipe, "flux", size)
    assert relative_error(draw(pipe, "flux", size), plain) < 1e-4
    assert {runner.eager_reason for runner in transformer_of(pipe).runners} == {None}
    undo_compile(pipe)


def test_a_processor_of_ones_own_runs_eager(make_session: MakeSession) -> None:
    pipe, twin, session = transformer_models.sd3(), transformer_models.sd3(), make_session()
    compile_pipe(pipe, session=session, ignores=("vae",))
    for each in (pipe, twin):
        each.transformer.transformer_blocks[1].attn.set_processor(Halved())
    for _ in range(2):
        found = draw(pipe, "sd3", SIZES[4])
    assert relative_error(found, draw(twin, "sd3", SIZES[4])) < 1e-4
    reasons = [runner.eager_reason for runner in transformer_of(pipe).runners]
    assert reasons == [None, "attention processor Halved is not known as pure", None]
    undo_compile(pipe)


def test_another_attention_backend_ends_a_recording(make_session: MakeSession) -> None:
    pipe, twin, session = transformer_models.flux(), transformer_models.flux(), make_session()
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=8)
    compile_pipe(pipe, session=session, ignores=("vae",))
    for _ in range(4):
        draw(pipe, "flux", SIZES[4])
    captured = transformer_of(pipe).captured
    assert captured.replayed
    with attention_backend("_native_math"):
        found = draw(pipe, "flux", SIZES[4])
        assert transformer_of(pipe).runners[0].eager_reason is not None
        assert relative_error(found, draw(twin, "flux", SIZES[4])) < 1e-4
    undo_compile(pipe)


@pytest.mark.parametrize("name", ["qwen_image", "z_image"])
def test_prompts_of_any_length_have_a_bounded_number_of_cuda_graphs(
    name: str, make_session: MakeSession
) -> None:
    """No length needs another graph. The least recently used CUDA graphs make room for new ones."""
    pipe, twin, session = MODELS[name].make(), MODELS[name].make(), make_session()
    recorder = FrozenRecorder()
    session.cuda_graphs = CudaGraphCache(recorder, limit=4)
    compile_pipe(pipe, session=session, ignores=("vae",))
    for tokens in (40, 7):  # Z-Image masks its prompts where their padded lengths differ
        draw(pipe, name, (64, 96, tokens, 1))
    kinds, most = list(session.kinds), 0
    for tokens in (40, 7, 33, 64, 65, 100, 9, 100, 7):
        found = draw(pipe, name, (64, 96, tokens, 1), num_inference_steps=4)
        expected = draw(twin, name, (64, 96, tokens, 1), num_inference_steps=4)
        assert relative_error(found, expected) < 1e-4, tokens
        assert transformer_of(pipe).captured.replayed
        most = max(most, len(session.cuda_graphs))
    assert session.kinds == kinds
    assert most == 4
    if name == "z_image":  # pads to multiples of 32 tokens: lengths of one multiple share
        assert (recorder.recorded, list(session.cuda_graphs.dropped)) == (4, [])
    else:
        assert recorder.recorded > most
        assert session.cuda_graphs.dropped[-1].endswith("there were 4 already")
    undo_compile(pipe)


def test_calls_with_a_mask_and_without_keep_their_cuda_graphs(make_session: MakeSession) -> None:
    """Under guidance they alternate at each step: one prompt is padded, the negatives are alike."""
    pipe, twin, session = MODELS["qwen_image"].make(), MODELS["qwen_image"].make(), make_session()
    recorder = FrozenRecorder()
    session.cuda_graphs = CudaGraphCache(recorder, limit=8)
    compile_pipe(pipe, session=session, ignores=("vae",))
    size = (64, 96, 40, 2)
    options = {"negative_prompt_embeds_mask": torch.ones(2, 20, dtype=torch.bool)}
    for _ in range(4):
        found = draw(pipe, "qwen_image", size, num_inference_steps=4, **options)
    expected = draw(twin, "qwen_image", size, num_inference_steps=4, **options)
    assert relative_error(found, expected) < 1e-4
    assert transformer_of(pipe).captured.replayed
    assert (recorder.recorded, list(session.cuda_graphs.dropped)) == (2, [])
    undo_compile(pipe)


def test_undo_restores_a_transformer() -> None:
    pipe = transformer_models.sd3()
    modules = list(pipe.transformer.modules())
    before = [dict(vars(module)) for module in modules]
    compile_pipe(pipe, options=CompileOptions(backend="eager", build="never"))
    assert vars(pipe.transformer.transformer_blocks[0]).keys() != before[1].keys()
    undo_compile(pipe)
    assert [dict(vars(module)) for module in modules] == before


@pytest.mark.parametrize("name", list(MODELS))
def test_warm_up_finds_every_kind(name: str, make_session: MakeSession) -> None:
    """So a picture after it builds nothing."""
    pipe, session = MODELS[name].make(), make_session()
    compile_pipe(pipe, session=session, ignores=("vae",))
    report = pipe_warm_up(pipe, [BatchShape(64, 96), BatchShape(72, 64, 2)]).run()
    assert [str(figures.shape) for figures in report.sizes] == ["64x96", "72x64@2"]
    kinds = {kind for kind in session.kinds if kind.state is KindState.READY}
    assert kinds == set(transformer_of(pipe).kinds())
    draw(pipe, name, SIZES[0])
    if name not in _MASKED:
        assert set(session.kinds) == kinds
    undo_compile(pipe)
    # A worker's trial chooses a size for each symbol: equal dims must be one symbol.
    for kind in kinds:
        program = load_program(quick_builds._BUILT[kind.key.digest])
        assert try_out(program, kind.graph, kind.device) is None


class Denoiser(torch.nn.Linear):
    """A model of somebody else's."""


def test_a_model_of_unknown_blocks_says_so(make_session: MakeSession) -> None:
    model, session = Denoiser(4, 4), make_session()
    pipe = SimpleNamespace(transformer=model)
    compile_pipe(pipe, session=session)
    with torch.no_grad(), session.picture():
        model(torch.ones(1, 4))
    assert session.status().running == "eager"
    assert session.status().reasons == ("no graphs are known for the blocks of Denoiser",)
    undo_compile(pipe)


def test_attention_of_unknown_blocks_says_so(make_session: MakeSession) -> None:
    model = build(
        diffusers.AuraFlowTransformer2DModel,
        0,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pos_embed_max_size=64,
    )
    pipe, session = SimpleNamespace(transformer=model), make_session()
    inputs = {
        "hidden_states": transformer_models.noise(1, 4, 8, 8),
        "encoder_hidden_states": transformer_models.noise(1, 5, 16),
        "timestep": torch.tensor([0.5]),
    }
    with torch.no_grad():
        expected = model(**inputs).sample
        compile_pipe(pipe, session=session)
        with session.picture():
            assert torch.equal(model(**inputs).sample, expected)
    assert session.status().running == "eager"
    (reason,) = session.status().reasons
    assert reason == "Attention: no graphs are known for the block of this attention"
    undo_compile(pipe)
