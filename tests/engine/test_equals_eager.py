"""Final latents of compiled pipelines are eager's, at sizes and batches no example had."""

from __future__ import annotations

import pytest
import torch

from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.hosts.diffusers.jobs.run_report import recompile_count
from tests.support import models
from tests.support.draw import draw_latents, relative_error

SIZES = ((136, 200, 1), (72, 64, 2))  # height_px, width_px, batch


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", sorted(models.BUILDERS))
def test_latents_equal_eager(name, backend, make_session):
    pipe = models.BUILDERS[name]() if backend == "eager" else models.one_width(name)
    expected = [draw_latents(pipe, height_px=h, width_px=w, batch=b) for h, w, b in SIZES]
    session = make_session(backend)
    compile_pipe(pipe, session=session)
    draw_latents(pipe)  # finds, builds and checks
    draw_latents(pipe)
    recompiles = recompile_count()
    found = [draw_latents(pipe, height_px=h, width_px=w, batch=b) for h, w, b in SIZES]
    assert recompile_count() == recompiles
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 1e-4
    states = {kind.label: (kind.state, kind.reason) for kind in session.kinds if kind.calls > 1}
    assert {state for state, _ in states.values()} == {KindState.READY}, states
    assert session.fallbacks() == []
    undo_compile(pipe)


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_controlnet_equals_eager(name, make_session):
    from diffusers import StableDiffusionControlNetPipeline, StableDiffusionXLControlNetPipeline

    base = models.BUILDERS[name]()
    cls = (
        StableDiffusionControlNetPipeline if name == "sd15" else StableDiffusionXLControlNetPipeline
    )
    parts = {k: v for k, v in base.components.items() if k not in ("image_encoder",)}
    pipe = cls(**parts, controlnet=models.controlnet_for(base.unet))
    pipe.set_progress_bar_config(disable=True)

    def draw() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        hint = torch.rand(1, 3, 72, 88, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            return pipe(
                "a cat", image=hint, num_inference_steps=3, output_type="latent",
                generator=generator,
            ).images  # fmt: skip

    expected = draw()
    compile_pipe(pipe, session=make_session())
    draw()
    found = draw()
    state = compiled_state(pipe)
    names = [component.name for component in state.components]
    assert "controlnet" in names
    assert all(component.kinds() for component in state.components if "vae" not in component.name)
    assert relative_error(found, expected) < 1e-4
    assert state.session.fallbacks() == []


def test_other_pipelines_of_the_same_components_run_compiled(make_session):
    from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting

    pipe = models.sd15()
    others = [AutoPipelineForImage2Image.from_pipe(pipe), AutoPipelineForInpainting.from_pipe(pipe)]
    for other in others:
        other.set_progress_bar_config(disable=True)
    expected = [draw_latents(other) for other in others]
    session = make_session()
    compile_pipe(pipe, session=session)
    draw_latents(pipe)
    calls = sum(kind.calls for kind in session.kinds)
    for other, latents in zip(others, expected, strict=True):
        assert relative_error(draw_latents(other), latents) < 1e-4
    assert sum(kind.calls for kind in session.kinds) > calls


def test_half_precision_is_as_exact_as_eager_in_half_precision(make_session):
    exact = draw_latents(models.one_width("sd15"))
    pipe = models.one_width("sd15").to(dtype=torch.bfloat16)
    eager_error = relative_error(draw_latents(pipe).float(), exact)
    session = make_session()
    compile_pipe(pipe, session=session, ignores=("vae",))
    draw_latents(pipe)
    assert relative_error(draw_latents(pipe).float(), exact) < 1.5 * eager_error
    assert {kind.state for kind in session.kinds} == {KindState.READY}


def test_batches_of_one_and_many_and_changing_tokens(make_session):
    unet = models.sd15().unet
    holder = type("Holder", (), {})()
    holder.unet = unet
    inputs = [
        models.unet_inputs(unet, b, h, w, tokens)
        for b, h, w, tokens in ((1, 17, 25, 77), (2, 8, 8, 154), (5, 9, 3, 78), (1, 3, 2, 231))
    ]
    with torch.no_grad():
        expected = [unet(**i).sample for i in inputs]
        session = make_session()
        compile_pipe(holder, session=session)
        unet(**inputs[1])
        for i, reference in zip(inputs, expected, strict=True):
            assert relative_error(unet(**i).sample, reference) < 1e-5
    assert session.fallbacks() == []
