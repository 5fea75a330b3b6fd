"""The guidance steps of `compile_pipe`: whose pictures they are for, their end, and refusals."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline

from onediff_ext.core.errors import OptionError
from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.guidance.guided_forward import GuidedForward
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled, undo_compile
from onediff_ext.hosts.diffusers.guidance_steps import (
    NO_GUIDANCE,
    OTHER_CALL,
    STEP_CACHE,
    guidance_steps_for,
)
from onediff_ext.session.session import Session
from tests.support import models, transformer_models
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder

NewSession = Callable[..., Session]
HALF = "interval:0-0.5"
STEPS = 4


@pytest.fixture
def pipe() -> Any:
    return models.sd15()


def draw(pipe: Any, **given: Any) -> torch.Tensor:
    given = {
        "prompt": ["a cat", "a red car"],
        "negative_prompt": ["blurred"] * 2,
        "num_inference_steps": STEPS,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(0),
        **(
            {} if isinstance(pipe, StableDiffusionImg2ImgPipeline) else {"height": 72, "width": 104}
        ),
        **given,
    }
    with torch.no_grad():
        latents: torch.Tensor = pipe(**given).images
    return latents


def are_alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether latents are equal but for the rounding of graphs; a step's guidance is far more."""
    return relative_error(found, expected) < 1e-4


def eager(pipe: Any, text: str, **given: Any) -> tuple[torch.Tensor, GuidedForward]:
    """What an eager pipeline draws, and how."""
    with guidance_steps_for(pipe, GuidanceOptions.parse(text)) as guided:
        latents = draw(pipe, **given)
    assert guided is not None
    return latents, guided


def texts_of(pipe: Any) -> dict[str, Any]:
    """Encoded prompts: a tokenizer serves one thread at a time."""
    names = ("prompt_embeds", "negative_prompt_embeds")
    encoded = pipe.encode_prompt(["a cat", "a red car"], "cpu", 1, True, ["blurred"] * 2)
    return {**dict(zip(names, encoded, strict=True)), "prompt": None, "negative_prompt": None}


def batches_of(pipe: Any) -> list[int]:
    """The batches of the calls that reach a UNet's layers, from now on."""
    found: list[int] = []
    pipe.unet.conv_in.register_forward_hook(lambda _, args, __: found.append(args[0].shape[0]))
    return found


def attributes(pipe: Any) -> dict[str, set[str]]:
    """The names of the attributes of a pipeline and of its UNet's modules."""
    named = {name: set(vars(module)) for name, module in pipe.unet.named_modules()}
    return {**named, "the pipeline": set(vars(pipe))}


def sibling(pipe: Any, cls: Any = StableDiffusionPipeline) -> Any:
    """Another pipeline with the same models."""
    return models.quiet(cls.from_pipe(pipe))


def test_they_end_with_the_compilation(pipe: Any, make_session: NewSession) -> None:
    whole, (half, _) = draw(pipe), eager(pipe, HALF)
    names = attributes(pipe)
    for _ in range(2):
        with compiled(pipe, session=make_session(), guidance_steps=HALF):
            assert are_alike(draw(pipe), half)
            assert are_alike(draw(pipe), half)  # each picture begins at its first step
        assert torch.equal(draw(pipe), whole)
        assert attributes(pipe) == names


def test_they_hold_for_the_calls_of_one_pipeline(pipe: Any, make_session: NewSession) -> None:
    session, other, third = make_session(), sibling(pipe), sibling(pipe)
    whole, (half, _) = draw(pipe), eager(pipe, HALF)
    quarter, _ = eager(pipe, "interval:0-0.25")
    compile_pipe(pipe, session=session, guidance_steps=HALF)
    compile_pipe(other, session=session, guidance_steps="interval:0-0.25")
    for _ in range(2):
        assert are_alike(draw(pipe), half)
        assert are_alike(draw(other), quarter)
        assert are_alike(draw(third), whole)
    undo_compile(pipe)
    assert are_alike(draw(pipe), whole)
    assert are_alike(draw(other), quarter)


def test_a_unet_that_replaces_another_one_has_them(pipe: Any, make_session: NewSession) -> None:
    compile_pipe(pipe, session=make_session(), guidance_steps=HALF)
    old, pipe.unet = pipe.unet, models.unet(seed=5)
    batches = batches_of(pipe)
    draw(pipe)
    assert batches == [4, 4, 2, 2]
    undo_compile(pipe)
    for unet in (old, pipe.unet):
        assert not [name for name, module in unet.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("at", [0, 2])
def test_an_exception_ends_the_picture(pipe: Any, make_session: NewSession, at: int) -> None:
    def interrupt(_: Any, step: int, __: Any, tensors: Any) -> Any:
        if step == at:
            raise KeyboardInterrupt
        return tensors

    whole, (half, _) = draw(pipe), eager(pipe, HALF)
    compile_pipe(pipe, session=make_session(), guidance_steps=HALF)
    with pytest.raises(KeyboardInterrupt):
        draw(pipe, callback_on_step_end=interrupt)
    assert are_alike(draw(sibling(pipe)), whole)
    assert are_alike(draw(pipe), half)


def test_the_prompt_is_the_same_tensor_at_each_step(pipe: Any) -> None:
    prompts: list[torch.Tensor] = []
    block = pipe.unet.mid_block
    block.register_forward_pre_hook(
        lambda _, __, kwargs: prompts.append(kwargs["encoder_hidden_states"]), with_kwargs=True
    )
    eager(pipe, HALF)
    assert [prompt.shape[0] for prompt in prompts] == [4, 4, 2, 2]
    assert prompts[2] is prompts[3]


def test_each_batch_has_a_cuda_graph(pipe: Any, make_session: NewSession) -> None:
    session, recorder = make_session(), FrozenRecorder()
    session.cuda_graphs = CudaGraphCache(recorder, limit=8)
    expected, _ = eager(pipe, HALF, num_inference_steps=12)
    compile_pipe(pipe, session=session, ignores=["vae"], guidance_steps=HALF)
    for _ in range(3):
        assert relative_error(draw(pipe, num_inference_steps=12), expected) < 1e-4
    assert len(session.cuda_graphs) == 2
    assert [graph.replays > 1 for graph in session.cuda_graphs._alive.values()] == [True] * 2
    assert session.fallbacks() == []


def test_a_picture_within_a_picture_is_drawn_for_itself(pipe: Any) -> None:
    inner: list[torch.Tensor] = []
    previews = sibling(pipe)
    previews.scheduler = models.scheduler()
    whole, (quarter, _) = draw(previews), eager(previews, "interval:0-0.25")
    half, _ = eager(pipe, HALF)

    def preview(_: Any, step: int, __: Any, tensors: Any) -> Any:
        # One without guidance too: two prompts are no [negative prompt, prompt].
        if step == 2:
            inner.append(draw(previews))
            inner.append(eager(previews, "interval:0-0.25")[0])
            inner.append(draw(previews, guidance_scale=1.0))
        return tensors

    unguided = draw(previews, guidance_scale=1.0)
    found, seen = eager(pipe, HALF, callback_on_step_end=preview)
    assert torch.equal(found, half)
    assert seen.reason == OTHER_CALL
    for latents, expected in zip(inner, (whole, quarter, unguided), strict=True):
        assert torch.equal(latents, expected)


def test_threads_that_share_a_unet_have_their_own_steps(pipe: Any) -> None:
    names = [HALF, "interval:0-0.25", "interval:0.5-1", "off"]
    pipes, texts = [sibling(pipe) for _ in names], texts_of(pipe)
    for each in pipes:
        each.scheduler = models.scheduler()
    options = [GuidanceOptions.parse(name) for name in names]

    def one(each: Any, chosen: GuidanceOptions) -> torch.Tensor:
        with guidance_steps_for(each, chosen):
            return draw(each, **texts)

    expected = [one(each, chosen) for each, chosen in zip(pipes, options, strict=True)]
    found: dict[int, torch.Tensor] = {}

    def run(number: int) -> None:
        found[number] = one(pipes[number], options[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torch.equal(found[n], expected[n]) for n in range(len(names))] == [True] * len(names)
    assert "forward" not in vars(pipe.unet)


def test_a_copy_that_is_made_meanwhile_runs_its_own_forward(pipe: Any) -> None:
    copies: list[Any] = []

    def copied(_: Any, step: int, __: Any, tensors: Any) -> Any:
        copies.append(copy.deepcopy(pipe.unet))
        return tensors

    eager(pipe, HALF, callback_on_step_end=copied)
    assert not any("forward" in vars(each) for each in copies)


def test_a_wrapper_that_comes_meanwhile_stays(pipe: Any) -> None:
    whole, (half, _) = draw(pipe), eager(pipe, HALF)

    def wrapped(_: Any, step: int, __: Any, tensors: Any) -> Any:
        if step == 0:
            inner = pipe.unet.forward
            pipe.unet.forward = lambda *args, **kwargs: inner(*args, **kwargs)
        return tensors

    assert torch.equal(eager(pipe, HALF, callback_on_step_end=wrapped)[0], half)
    assert torch.equal(draw(pipe), whole)
    assert torch.equal(eager(pipe, HALF)[0], half)


def test_hooks_of_accelerate_stay_the_outermost(pipe: Any) -> None:
    accelerate = pytest.importorskip("accelerate")

    def offloaded() -> Any:
        # What `enable_model_cpu_offload` does with each model; here the GPU is the CPU.
        return accelerate.cpu_offload_with_hook(pipe.unet, torch.device("cpu"))

    def again(_: Any, step: int, __: Any, tensors: Any) -> Any:
        if step == 2:  # as pipelines do at their end
            accelerate.hooks.remove_hook_from_module(pipe.unet)
            offloaded()
        return tensors

    half, _ = eager(pipe, HALF)
    offloaded()
    for callback in (None, again, None):
        assert torch.equal(eager(pipe, HALF, callback_on_step_end=callback)[0], half)
    accelerate.hooks.remove_hook_from_module(pipe.unet)
    assert not isinstance(pipe.unet.forward, GuidedForward)


def test_without_guidance_the_batch_is_whole_and_the_status_says_why(
    pipe: Any, make_session: NewSession
) -> None:
    session = make_session()
    expected = draw(pipe, guidance_scale=1.0)
    compile_pipe(pipe, session=session, guidance_steps=HALF)
    assert are_alike(draw(pipe, guidance_scale=1.0), expected)
    assert [(each.what, each.reason) for each in session.fallbacks()] == [
        ("guidance steps", NO_GUIDANCE)
    ]


def test_guidance_that_a_callback_ends_itself_stays_ended(pipe: Any) -> None:
    def end(of: Any, step: int, _: Any, tensors: Any) -> Any:
        if step == 0:
            of._guidance_scale = 0.0
            return {**tensors, "prompt_embeds": tensors["prompt_embeds"].chunk(2)[-1]}
        return tensors

    names = {"callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    expected = draw(pipe, callback_on_step_end=end, **names)
    found, seen = eager(pipe, HALF, callback_on_step_end=end, **names)
    assert torch.equal(found, expected)
    assert (seen.counts["prompt"], seen.reason) == (0, NO_GUIDANCE)


def test_unknown_arguments_with_tensors_run_whole(pipe: Any) -> None:
    class Accepting(diffusers.models.attention_processor.AttnProcessor):  # type: ignore[misc]
        def __call__(self, *args: Any, masks: object = None, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    pipe.unet.set_attn_processor(Accepting())
    expected = draw(pipe)
    found, seen = eager(pipe, HALF, cross_attention_kwargs={"masks": torch.ones(4, 1)})
    assert torch.equal(found, expected)
    assert "cross_attention_kwargs" in seen.reason


def test_a_step_cache_runs_whole(pipe: Any) -> None:
    expected = draw(pipe)
    pipe.unet.is_cache_enabled = True  # diffusers has none for these models yet
    found, seen = eager(pipe, HALF)
    assert torch.equal(found, expected)
    assert (seen.counts, seen.reason) == ({"whole": STEPS}, STEP_CACHE)


@pytest.mark.parametrize("how", ["forward", "call"])
def test_a_unet_that_the_user_compiles_runs_whole(pipe: Any, how: str) -> None:
    class Compiled:
        """Runs eager, and says that `torch.compile` made it."""

        _torchdynamo_orig_callable = None

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return type(pipe.unet).forward(pipe.unet, *args, **kwargs)

    expected = draw(pipe)
    if how == "forward":
        pipe.unet.forward = Compiled()
    else:
        pipe.unet.compile(backend="eager")
    installed: list[bool] = []

    def look(_: Any, step: int, __: Any, tensors: Any) -> Any:
        installed.append(isinstance(vars(pipe.unet).get("forward"), GuidedForward))
        return tensors

    found, seen = eager(pipe, HALF, callback_on_step_end=look)
    assert are_alike(found, expected)
    assert "torch.compile" in seen.reason
    assert not any(installed)


def _pag() -> Any:
    return diffusers.AutoPipelineForText2Image.from_pipe(models.sd15(), enable_pag=True)


def _instruct() -> Any:
    base = models.sd15(in_channels=8)
    parts = {k: v for k, v in base.components.items() if k != "image_encoder"}
    cls = diffusers.StableDiffusionInstructPix2PixPipeline
    return models.quiet(cls(**parts, requires_safety_checker=False))


@pytest.mark.parametrize(
    "make",
    [
        transformer_models.flux, transformer_models.qwen_image, transformer_models.z_image,
        transformer_models.lumina2, _pag, _instruct,
    ],
)  # fmt: skip
def test_pipelines_with_other_batches_are_refused(
    make: Callable[[], Any], make_session: NewSession
) -> None:
    pipe = make()
    session = make_session()
    with pytest.raises(OptionError, match=type(pipe).__name__):
        compile_pipe(pipe, session=session, guidance_steps=HALF)
    compile_pipe(pipe, session=session, guidance_steps="off")


def test_two_devices_for_one_batch_are_refused(pipe: Any, make_session: NewSession) -> None:
    session = make_session(cfg_parallel="auto")
    with pytest.raises(OptionError, match="cfg_parallel"):
        compile_pipe(pipe, session=session, guidance_steps=HALF)
    compile_pipe(pipe, session=session, guidance_steps="interval:0-1")


def test_a_subclass_with_a_loop_of_its_own_is_refused(pipe: Any, make_session: NewSession) -> None:
    class Own(StableDiffusionPipeline):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    class Named(StableDiffusionPipeline):  # type: ignore[misc]
        pass

    with pytest.raises(OptionError, match="Own"):
        compile_pipe(sibling(pipe, Own), session=make_session(), guidance_steps=HALF)
    compile_pipe(sibling(pipe, Named), session=make_session(), guidance_steps=HALF)
