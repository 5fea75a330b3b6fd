"""A user's own `torch.compile` over compiled models compiles the host's code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionControlNetPipeline

from onediff_ext import compile_module, compile_pipe, undo_compile
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.torch_compile import TORCH_COMPILES
from onediff_ext.hosts.diffusers.compile import compiled_state
from onediff_ext.hosts.diffusers.deepcache import deepcache_state
from onediff_ext.hosts.diffusers.step_cache import enable_step_cache
from onediff_ext.session.session import Session
from tests.support import models, transformer_models
from tests.support.draw import relative_error
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.transformer_draws import draw as draw_transformer
from tests.support.transformer_models import MODELS

# Dynamo traces; nothing is generated. A graph break is an error.
HOW = {"backend": "eager", "fullgraph": True}


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    """No code compiled by another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def draw(pipe: Any, seed: int = 3, steps: int = 2) -> torch.Tensor:
    """A picture with its pixels, or latents of a transformer."""
    if not hasattr(pipe, "unet"):
        return draw_transformer(
            pipe, "flux", (64, 96, 40, 1), num_inference_steps=steps, output_type="pt",
            **MODELS["flux"].embeddings(40, 1, seed),
        )  # fmt: skip
    more = {}
    if hasattr(pipe, "controlnet"):
        image = torch.rand(1, 3, 64, 72, generator=torch.Generator().manual_seed(1))
        more = {"image": image, "control_guidance_end": 0.5}
    pixels: torch.Tensor = pipe(
        "a cat", num_inference_steps=steps, height=64, width=72, output_type="pt",
        generator=torch.Generator().manual_seed(seed), **more,
    ).images  # fmt: skip
    return pixels


def draw_with_graphs(pipe: Any) -> None:
    """Draw, wait for the graphs that are missing, and draw with them."""
    draw(pipe)
    compiled_state(pipe).session.wait_for_builds()
    draw(pipe)


def with_controlnet() -> Any:
    pipe = models.sd15()
    return models.quiet(
        StableDiffusionControlNetPipeline(
            **pipe.components,
            controlnet=models.controlnet_for(pipe.unet),
            requires_safety_checker=False,
        )
    )


def wrap(pipe: Any) -> None:
    name = "unet" if hasattr(pipe, "unet") else "transformer"
    setattr(pipe, name, torch.compile(getattr(pipe, name), **HOW))


def in_place(pipe: Any) -> None:
    getattr(pipe, "unet", getattr(pipe, "transformer", None)).compile(**HOW)


def forward(pipe: Any) -> None:
    pipe.unet.forward = torch.compile(pipe.unet.forward, **HOW)


def repeated_blocks(pipe: Any) -> None:
    pipe.transformer.compile_repeated_blocks(**HOW)


def decode(pipe: Any) -> None:
    pipe.vae.decode = torch.compile(pipe.vae.decode, **HOW)


def decoder(pipe: Any) -> None:
    pipe.vae.decoder = torch.compile(pipe.vae.decoder, **HOW)


def controlnet(pipe: Any) -> None:
    pipe.controlnet.compile(**HOW)


def reasons(pipe: Any, name: str) -> set[str | None]:
    """Why the blocks of a component ran eager, as the status has it."""
    (component,) = [c for c in compiled_state(pipe).components if c.name == name]
    return {runner.eager_reason for runner in component.runners}


def attributes(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """What the modules of a model have, by identity."""
    return {
        name: {key: id(value) for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


FLUX = transformer_models.flux
CASES = [
    (models.sd15, wrap, "unet", "before"),
    (models.sd15, wrap, "unet", "after a picture"),
    (models.sd15, in_place, "unet", "after"),
    (models.sd15, in_place, "unet", "after a picture"),
    (models.sd15, forward, "unet", "before"),
    (models.sd15, forward, "unet", "after"),
    (models.sd15, decode, "vae_decoder", "after a picture"),
    (models.sd15, decoder, "vae_decoder", "before"),
    (FLUX, wrap, "transformer", "after"),
    (FLUX, in_place, "transformer", "before"),
    (FLUX, repeated_blocks, "transformer", "before"),
    (FLUX, repeated_blocks, "transformer", "after a picture"),
    (with_controlnet, controlnet, "controlnet", "after"),
]


@pytest.mark.parametrize(("make", "user", "name", "order"), CASES)
def test_the_picture_is_that_of_an_eager_twin(
    make: Callable[[], Any],
    user: Callable[[Any], None],
    name: str,
    order: str,
    make_session: Callable[..., Session],
) -> None:
    pipe, session = make(), make_session()
    expected = draw(make())
    if order == "before":
        user(pipe)
    compile_pipe(pipe, session=session)
    if order == "after a picture":
        draw_with_graphs(pipe)
        assert reasons(pipe, name) == {None}
    if order != "before":
        user(pipe)
    for _ in range(2):
        assert relative_error(draw(pipe), expected) < 1e-5
        assert reasons(pipe, name) == {TORCH_COMPILES}
    status = session.status()
    assert status.running != "compiled"
    assert dict(status.eager_blocks)[TORCH_COMPILES] == len(
        next(c for c in compiled_state(pipe).components if c.name == name).runners
    )
    undo_compile(pipe)
    assert torch.equal(draw(pipe), expected)


@pytest.mark.parametrize("user", [wrap, in_place])
def test_undo_leaves_the_users_module_as_it_was(
    user: Callable[[Any], None], make_session: Callable[..., Session]
) -> None:
    pipe = models.sd15()
    user(pipe)
    draw(pipe)
    before, unet = attributes(pipe.unet), pipe.unet
    compile_pipe(pipe, session=make_session(channels_last=False))
    draw(pipe)
    assert attributes(unet) != before
    undo_compile(pipe)
    assert pipe.unet is unet
    assert attributes(unet) == before


def test_a_model_that_is_no_longer_compiled_runs_its_graphs(
    make_session: Callable[..., Session],
) -> None:
    pipe, session = compile_pipe(models.sd15(), session=make_session()), None
    own = pipe.unet
    wrap(pipe)
    draw(pipe)
    pipe.unet, session = own, compiled_state(pipe).session
    draw_with_graphs(pipe)
    assert reasons(pipe, "unet") == {None}
    assert session.status().running == "compiled"


@pytest.mark.parametrize("order", ["before", "after"])
def test_single_models(order: str, make_session: Callable[..., Session]) -> None:
    unet, twin = models.unet(), models.unet()
    inputs = models.unet_inputs(unet, 2, 16, 16)
    session = make_session(channels_last=False)
    if order == "before":
        module = compile_module(torch.compile(unet, **HOW), session=session)
    else:
        module = torch.compile(compile_module(unet, session=session), **HOW)
    with torch.no_grad():
        expected = twin(**inputs).sample
        assert relative_error(module(**inputs).sample, expected) < 1e-6
        assert session.status().running == "eager"
        undo_compile(module)
        assert not [m for m in unet.modules() if "forward" in vars(m)]
        assert torch.equal(module(**inputs).sample, expected)


def louder(cls: type) -> type:
    """A class of blocks whose output is twice as large."""
    own = vars(cls)["forward"]
    return type("Louder", (cls,), {"forward": lambda *args, **kwargs: 2 * own(*args, **kwargs)})


def test_a_class_that_was_exchanged_is_followed(make_session: Callable[..., Session]) -> None:
    """As token merging exchanges it."""
    pipe, twin = models.sd15(), models.sd15()
    compile_pipe(pipe, session=make_session(), ignores=("vae",))
    plain = draw(twin)
    for each in (pipe, twin):
        for module in each.unet.modules():
            if type(module).__name__ == "BasicTransformerBlock":
                module.__class__ = louder(type(module))
    in_place(pipe)
    expected = draw(twin)
    assert relative_error(expected, plain) > 1e-3
    assert relative_error(draw(pipe), expected) < 1e-5


@pytest.mark.parametrize(
    ("cache", "user"), [("first-block:0.5", in_place), ("taylorseer-lite:3", repeated_blocks)]
)
def test_with_a_step_cache(
    cache: str, user: Callable[[Any], None], make_session: Callable[..., Session]
) -> None:
    """The twin has cache and torch.compile too; a cache's decision breaks Dynamo's graph."""
    pipe, twin = transformer_models.flux(), transformer_models.flux()
    compile_pipe(pipe, session=make_session(), ignores=("vae",))
    for each in (pipe, twin):
        enable_step_cache(each, cache, 4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(HOW, "fullgraph", False)
            user(each)
    for seed in range(2):
        assert relative_error(draw(pipe, seed, 4), draw(twin, seed, 4)) < 1e-5


@pytest.mark.parametrize("part", ["unet", "controlnet", "one block"])
def test_with_deepcache(part: str, make_session: Callable[..., Session]) -> None:
    """DeepCache sees no step of what torch.compile compiles, and draws whole steps."""
    pipe, twin = with_controlnet(), with_controlnet()
    compile_pipe(pipe, session=make_session(), ignores=("vae",), deepcache=3)
    draw(pipe, steps=10)
    assert deepcache_state(pipe).counts["shallow"]
    if part == "one block":
        pipe.unet.up_blocks[1].compile(**HOW)
    else:
        getattr(pipe, part).compile(**HOW)
    assert relative_error(draw(pipe, steps=10), draw(twin, steps=10)) < 1e-5
    if part != "unet":
        assert deepcache_state(pipe).counts == {"plain": 10}
        assert TORCH_COMPILES in deepcache_state(pipe).reason


@pytest.mark.parametrize(
    ("name", "part"),
    [("flux", "embedder"), ("z_image", "model"), ("z_image", "repeated blocks")],
)
def test_the_prompts_part_is_not_done_twice(
    name: str, part: str, make_session: Callable[..., Session]
) -> None:
    """Where Dynamo runs a layer that would return its input."""
    session = make_session()
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=8)
    pipe = compile_pipe(MODELS[name].make(), session=session, ignores=("vae",))
    twin = MODELS[name].make()

    def both(seed: int) -> list[torch.Tensor]:
        return [
            draw_transformer(
                each, name, (64, 96, 40, 1), num_inference_steps=4,
                **MODELS[name].embeddings(40, 1, seed),
            )
            for each in (pipe, twin)
        ]  # fmt: skip

    for seed in range(3):
        both(seed)
    component = compiled_state(pipe).components[0]
    assert component.captured.replayed
    model = pipe.transformer
    if part == "model":
        model.compile(**HOW)
    elif part == "embedder":
        (model.context_embedder if name == "flux" else model.cap_embedder).compile(**HOW)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(HOW, "fullgraph", False)
            model.compile_repeated_blocks(**HOW)
    for seed in range(3, 5):
        found, expected = both(seed)
        assert relative_error(found, expected) < 1e-5
    if part != "model":  # whose calls reach nothing of ours
        assert not component.captured.replayed
        assert TORCH_COMPILES in component.captured.reason


@pytest.mark.parametrize("strict", [True, False])
def test_an_export_is_that_of_the_host(make_session: Callable[..., Session], strict: bool) -> None:
    unet, twin = models.unet(), models.unet()
    inputs = models.unet_inputs(unet, 2, 16, 16)
    compile_module(unet, session=make_session(channels_last=False))
    with torch.no_grad():
        unet(**inputs)
        found, expected = (
            torch.export.export(each, (), inputs, strict=strict) for each in (unet, twin)
        )
        assert [n.target for n in found.graph.nodes] == [n.target for n in expected.graph.nodes]
        assert torch.equal(found.module()(**inputs).sample, twin(**inputs).sample)
