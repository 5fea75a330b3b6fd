"""What a warm-up records serves the first picture of a size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image

from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.hosts.diffusers.compile import compile_pipe, undo_compile
from onediff_ext.hosts.diffusers.denoiser_calls import timestep_dtype_of
from onediff_ext.hosts.diffusers.warmup import pipe_warm_up
from onediff_ext.session.session import Session
from tests.support import models
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.transformer_draws import SIZES, without_guidance
from tests.support.transformer_draws import draw as draw_with_transformer
from tests.support.transformer_models import MODELS

MakeSession = Callable[..., Session]
WIDTH_PX, HEIGHT_PX = 72, 64
INPAINTED = {
    "image": Image.new("RGB", (WIDTH_PX, HEIGHT_PX)),
    "mask_image": Image.new("L", (WIDTH_PX, HEIGHT_PX), 255),
}

# Z-Image-Turbo has no guidance. Chroma's text encoder gives its mask in the dtype of the prompt.
OPTIONS = {
    "z_image": without_guidance("z_image"),
    "chroma": {
        name: torch.ones(1, 1)
        for name in ("prompt_attention_mask", "negative_prompt_attention_mask")
    },
}


def draw(pipe: Any, **options: Any) -> None:
    pipe(
        "a fox",
        width=WIDTH_PX,
        height=HEIGHT_PX,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(3),
        output_type="latent",
        **options,
    )


def session_with_recorder(make_session: MakeSession) -> Session:
    session = make_session(spot_checks=False)
    session.cuda_graphs = CudaGraphCache(FrozenRecorder(), limit=8)
    return session


@pytest.mark.parametrize(
    ("model", "options"),
    [("sd15", {}), ("sdxl", {}), ("lcm", {}), ("sd15_inpaint", INPAINTED)],
)
def test_a_picture_after_a_warm_up_records_nothing(
    model: str, options: dict[str, Any], make_session: MakeSession
) -> None:
    pipe, session = getattr(models, model)(), session_with_recorder(make_session)
    compile_pipe(pipe, session=session, ignores=["vae"])
    pipe_warm_up(pipe, [BatchShape(WIDTH_PX, HEIGHT_PX)]).run()
    made = session.cuda_graphs.made
    assert made == 1
    draw(pipe, **options)
    assert session.cuda_graphs.made == made
    draw(pipe, **options, num_images_per_prompt=2)  # of another size: these are recorded
    assert session.cuda_graphs.made == made + 1
    undo_compile(pipe)


@pytest.mark.parametrize(("steps", "made"), [("gate:0.5", 3), ("interval:0-0.5", 2)])
def test_nor_does_one_with_guidance_steps(steps: str, made: int, make_session: MakeSession) -> None:
    pipe, session = models.sd15(), session_with_recorder(make_session)
    guidance_steps = GuidanceOptions.parse(steps)
    compile_pipe(pipe, session=session, ignores=["vae"], guidance_steps=guidance_steps)
    pipe_warm_up(pipe, [BatchShape(WIDTH_PX, HEIGHT_PX)]).run()
    assert session.cuda_graphs.made == made
    draw(pipe)
    assert session.cuda_graphs.made == made
    undo_compile(pipe)


@pytest.mark.parametrize("name", ["sd3", "flux", "chroma", "lumina2", "qwen_image", "z_image"])
def test_a_transformer_is_called_as_its_pipeline_calls_it(
    name: str, make_session: MakeSession
) -> None:
    """Prompts have other lengths than a warm-up's, so sizes differ; the form of calls does not."""
    pipe, session = MODELS[name].make(), session_with_recorder(make_session)
    compile_pipe(pipe, session=session, ignores=["vae"])
    pipe_warm_up(pipe, [BatchShape(64, 64)]).run()
    (known,) = forms_of(session)
    draw_with_transformer(pipe, name, SIZES[0], num_inference_steps=4, **OPTIONS.get(name, {}))
    assert forms_of(session) == {known}
    undo_compile(pipe)


def forms_of(session: Session) -> set[object]:
    """The forms of the calls that were recorded: `ForwardCall.form`."""
    return {key[2][0] for key in session.cuda_graphs._alive}


def test_a_scheduler_tells_the_dtype_of_its_timesteps_and_stays_as_it_is() -> None:
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(7)
    assert timestep_dtype_of(scheduler) == torch.int64
    assert len(scheduler.timesteps) == 7
    assert timestep_dtype_of(models.sd15().scheduler) == torch.float32
    assert timestep_dtype_of(None) is None
