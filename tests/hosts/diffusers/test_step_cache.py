"""diffusers' step caches on compiled pipelines, beside the same cache on an eager twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from onediff_ext import compile_pipe, undo_compile
from onediff_ext.core.errors import OptionError
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.diffusers.compile import compiled_state
from onediff_ext.hosts.diffusers.pipeline_calls import sampling_steps
from onediff_ext.hosts.diffusers.step_cache import disable_step_cache, enable_step_cache
from onediff_ext.session.session import Session
from tests.support import transformer_models as models
from tests.support.frozen_recorder import FrozenRecorder

CACHES = ("first-block:0.5", "mag-cache:0.3", "taylorseer-lite:3")
STEPS = 8


def draw(pipe: Any, seed: int = 0, steps: int = STEPS, **more: Any) -> torch.Tensor:
    """Eight steps from seeded embeddings."""
    pixels: torch.Tensor = pipe(
        **models.flux_embeddings(20, seed=seed), width=64, height=64, num_inference_steps=steps,
        output_type="pt", generator=torch.Generator().manual_seed(seed), **more,
    ).images  # fmt: skip
    return pixels


def compiled_flux(make_session: Callable[..., Session], **options: Any) -> Any:
    """Compiled, with all graphs."""
    pipe = compile_pipe(models.flux(), session=make_session(**options), ignores=("vae",))
    draw(pipe)
    return pipe


def transformer_of(pipe: Any) -> Any:
    """The transformer's component."""
    state = compiled_state(pipe)
    assert state is not None
    return state.components[0]


@pytest.mark.parametrize("cache", CACHES)
def test_pictures_equal_those_of_the_cache_alone(
    cache: str, make_session: Callable[..., Session]
) -> None:
    """Blocks run through their graphs, also after the first picture; off is off."""
    pipe, twin = compiled_flux(make_session), models.flux()
    plain = draw(twin)
    enable_step_cache(pipe, cache, STEPS)
    enable_step_cache(twin, cache, STEPS)
    calls = sum(kind.calls for kind in transformer_of(pipe).kinds())
    for seed in range(2):
        torch.testing.assert_close(draw(pipe, seed), draw(twin, seed), rtol=1e-4, atol=1e-5)
    ran = sum(kind.calls for kind in transformer_of(pipe).kinds()) - calls
    assert 0 < ran < 2 * STEPS * 4  # of four blocks, and not all of them
    assert [runner.eager_reason for runner in transformer_of(pipe).runners] == [None] * 4
    assert (draw(twin) - plain).abs().max() > 1e-3
    disable_step_cache(pipe)
    torch.testing.assert_close(draw(pipe), plain, rtol=1e-4, atol=1e-5)


def test_a_cuda_graph_from_before_is_not_replayed(make_session: Callable[..., Session]) -> None:
    """A cache decides in Python at each step; afterwards the forward is recorded again."""
    session, recorder = make_session(), FrozenRecorder()
    session.cuda_graphs = CudaGraphCache(recorder, limit=3)
    pipe = compile_pipe(models.flux(), session=session, ignores=("vae",))
    for seed in range(3):
        draw(pipe, seed)
    captured = transformer_of(pipe).captured
    assert captured.replayed
    twin = models.flux()
    for each in (pipe, twin):
        enable_step_cache(each, "first-block:0.5")
    for seed in range(2):
        torch.testing.assert_close(draw(pipe, seed), draw(twin, seed), rtol=1e-4, atol=1e-5)
    assert not captured.replayed
    assert (
        captured.reason
        == "a FluxTransformerBlock has the forward of the step cache FirstBlockCache"
    )
    disable_step_cache(pipe)
    disable_step_cache(twin)
    for seed in range(3):
        torch.testing.assert_close(draw(pipe, seed), draw(twin, seed), rtol=1e-4, atol=1e-5)
    assert captured.replayed


def test_the_option_sets_it_up_and_takes_it_back(make_session: Callable[..., Session]) -> None:
    """As a compile option; `undo_compile` leaves every forward as it was."""
    pipe = compiled_flux(make_session, step_cache="first-block:0.5")
    assert pipe.transformer.is_cache_enabled
    undo_compile(pipe)
    assert not pipe.transformer.is_cache_enabled
    assert not [m for m in pipe.transformer.modules() if "forward" in vars(m)]


def test_a_users_own_cache_stays(make_session: Callable[..., Session]) -> None:
    """Switched on before `compile_pipe`: graphs run inside of it, and it outlives them."""
    pipe, twin = models.flux(), models.flux()
    for each in (pipe, twin):
        enable_step_cache(each, "first-block:0.5")
    compile_pipe(pipe, session=make_session(), ignores=("vae",))
    for seed in range(2):
        torch.testing.assert_close(draw(pipe, seed), draw(twin, seed), rtol=1e-4, atol=1e-5)
    assert [runner.eager_reason for runner in transformer_of(pipe).runners] == [None] * 4
    undo_compile(pipe)
    assert pipe.transformer.is_cache_enabled
    torch.testing.assert_close(draw(pipe), draw(twin))


@pytest.mark.parametrize(
    ("make", "cache", "message"),
    [
        (models.sd3, "first-block", "no step cache for SD3Transformer2DModel"),
        (models.z_image, "first-block", "no step cache for ZImageTransformer2DModel"),
        (models.lumina2, "first-block", "no step cache for Lumina2Transformer2DModel"),
        (models.chroma, "first-block", "ChromaPipeline runs without step caches"),
        (models.qwen_image, "mag-cache", "no magnitudes of QwenImageTransformer2DModel"),
        (models.flux, "teacache", "no step cache 'teacache'"),
        (models.flux, "first-block:0", "threshold of 0"),
        (models.flux, "taylorseer-lite:1.5", "interval of 1.5"),
        (models.flux, "first-block:x", "'x' is no number"),
    ],
)
def test_where_there_is_none(make: Callable[[], Any], cache: str, message: str) -> None:
    """Nothing changes, and the error says what to do."""
    pipe = make()
    with pytest.raises(OptionError, match=message) as caught:
        enable_step_cache(pipe, cache)
    assert caught.value.hint
    assert not getattr(pipe.transformer, "is_cache_enabled", False)


@pytest.mark.parametrize("cache", ["first-block:0.9", "taylorseer-lite:3"])
def test_a_picture_that_fails_leaves_nothing_to_the_next(
    cache: str, make_session: Callable[..., Session]
) -> None:
    pipe = enable_step_cache(compiled_flux(make_session), cache, STEPS)
    expected = draw(pipe)

    class StoppedError(Exception):
        """Raised in the middle of a picture."""

    def stop(_pipe: Any, step: int, _timestep: Any, kept: Any) -> Any:
        if step == 4:
            raise StoppedError
        return kept

    for width in (64, 96):
        with pytest.raises(StoppedError):
            pipe(
                **models.flux_embeddings(20, seed=1), width=width, height=64,
                num_inference_steps=STEPS, callback_on_step_end=stop,
            )  # fmt: skip
        assert torch.equal(draw(pipe), expected)


def has_forwards_of_others(model: Any) -> bool:
    """Whether a model has forwards that are not its class's, which diffusers' hooks leave."""
    own = [
        (module, vars(module)["forward"]) for module in model.modules() if "forward" in vars(module)
    ]
    return any(
        getattr(forward, "__func__", None) is not type(module).forward for module, forward in own
    )


@pytest.mark.parametrize("ignores", [("vae",), ("vae", "transformer")])
def test_a_transformer_that_replaces_another_gets_the_options_cache(
    ignores: tuple[str, ...], make_session: Callable[..., Session]
) -> None:
    """And the old one is left without it, and without graphs."""
    pipe, twin = models.flux(), models.flux()
    if "transformer" in ignores:  # something has to be compiled
        ignores = ("vae_encoder", "transformer")
    compile_pipe(pipe, session=make_session(step_cache="first-block:0.5"), ignores=ignores)
    old, twin.transformer = pipe.transformer, models.flux(seed=5).transformer
    draw(pipe)
    pipe.transformer = models.flux(seed=5).transformer
    enable_step_cache(twin, "first-block:0.5")
    for seed in range(2):
        torch.testing.assert_close(draw(pipe, seed), draw(twin, seed), rtol=1e-4, atol=1e-5)
    assert not old.is_cache_enabled
    assert not has_forwards_of_others(old)
    undo_compile(pipe)
    assert not pipe.transformer.is_cache_enabled
    assert not has_forwards_of_others(pipe.transformer)


def test_a_users_own_cache_leaves_no_graphs_in_a_replaced_transformer(
    make_session: Callable[..., Session],
) -> None:
    pipe = enable_step_cache(compiled_flux(make_session), "first-block:0.5")
    old, pipe.transformer = pipe.transformer, models.flux(seed=5).transformer
    draw(pipe)
    assert old.is_cache_enabled
    old.disable_cache()
    assert not has_forwards_of_others(old)


@pytest.mark.parametrize("first_out", [0, 1])
@pytest.mark.parametrize("own", [None, "taylorseer-lite:3"])
def test_pipelines_that_share_a_transformer(
    first_out: int, own: str | None, make_session: Callable[..., Session]
) -> None:
    """Who is undone leaves the other's cache, and both leave the user's own, which was before."""
    pipes = [models.flux()]
    if own is not None:
        enable_step_cache(pipes[0], own)
    pipes.append(type(pipes[0])(**pipes[0].components))
    before = pipes[0].transformer._cache_config
    for pipe, cache in zip(pipes, ("first-block:0.5", "first-block:0.9"), strict=True):
        compile_pipe(pipe, session=make_session(step_cache=cache), ignores=("vae",))
    assert pipes[0].transformer._cache_config.threshold == 0.9
    undo_compile(pipes[first_out])
    twin = enable_step_cache(models.flux(), ("first-block:0.9", "first-block:0.5")[first_out])
    for seed in range(2):
        found = draw(pipes[1 - first_out], seed)
        torch.testing.assert_close(found, draw(twin, seed), rtol=1e-4, atol=1e-5)
    undo_compile(pipes[1 - first_out])
    assert pipes[0].transformer._cache_config is before
    assert has_forwards_of_others(pipes[0].transformer) == (own is not None)


def test_a_compiled_pipeline_with_a_cache_is_copied(make_session: Callable[..., Session]) -> None:
    pipe = compiled_flux(make_session, step_cache="first-block:0.5")
    expected = draw(pipe)
    copied = copy.deepcopy(pipe)
    assert compiled_state(copied) is None
    assert torch.equal(draw(pipe), expected)


def test_mag_cache_follows_the_number_of_steps(make_session: Callable[..., Session]) -> None:
    """It has a magnitude for each step; a picture has the steps that its call names."""
    pipe, twin = compiled_flux(make_session, step_cache="mag-cache:0.3"), models.flux()
    before = pipe.transformer._cache_config
    assert before.num_inference_steps == STEPS
    for steps in (STEPS, 5, 11, STEPS):
        enable_step_cache(twin, "mag-cache:0.3", steps)
        found, expected = draw(pipe, steps=steps), draw(twin, steps=steps)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert pipe.transformer._cache_config.num_inference_steps == steps
    undo_compile(pipe)
    assert not has_forwards_of_others(pipe.transformer)


@pytest.mark.parametrize("strength", [0.05, 0.3, 0.6, 0.61, 1.0])
@pytest.mark.parametrize("steps", [1, 8, 15, 28])
def test_steps_of_an_image_to_image_call(strength: float, steps: int) -> None:
    """A strength leaves out the first ones, as diffusers rounds it."""
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(steps)
    pipe = models.flux(cls=diffusers.FluxImg2ImgPipeline)
    pipe.scheduler = scheduler
    timesteps, _ = pipe.get_timesteps(steps, strength, "cpu")
    found = sampling_steps({"num_inference_steps": steps, "strength": strength, "sigmas": None})
    assert found == len(timesteps)


def test_steps_of_a_schedule_of_ones_own() -> None:
    assert sampling_steps({"num_inference_steps": 28, "sigmas": [1.0, 0.7, 0.3]}) == 3
    assert sampling_steps({"width": 64}) is None


@pytest.mark.parametrize(
    "timesteps", [50, torch.tensor(3.0), iter([1, 2])], ids=["number", "tensor", "iterator"]
)
def test_a_call_with_another_meaning_of_timesteps(timesteps: object) -> None:
    """As pipelines of the user's own may have; the number of steps is unknown then."""
    assert sampling_steps({"num_inference_steps": 8, "timesteps": timesteps}) is None


@pytest.mark.parametrize("more", [{"num_inference_steps": 0}, {"strength": float("nan")}], ids=str)
def test_a_call_that_the_pipeline_refuses(more: dict[str, Any]) -> None:
    assert sampling_steps({"num_inference_steps": 8, **more}) is None


def test_mag_cache_of_the_user_keeps_its_steps(make_session: Callable[..., Session]) -> None:
    """Also while a compile option's cache has been switched off by hand."""
    pipe = compiled_flux(make_session, step_cache="mag-cache:0.3")
    pipe.transformer.disable_cache()
    draw(pipe, steps=5)
    assert not pipe.transformer.is_cache_enabled
    enable_step_cache(pipe, "mag-cache:0.3", STEPS)
    draw(pipe, steps=5)
    assert pipe.transformer._cache_config.num_inference_steps == STEPS
