"""OneDiff's own scripts run with another import and nothing else changed.

Models and sizes are small here, and graphs are built at once. The texts of the scripts are ours;
the calls are those of OneDiff's articles and examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LCMScheduler, StableDiffusionXLImg2ImgPipeline
from PIL import Image

from onediff_ext import compile_module, compile_pipe, load_pipe, oneflow_compile, save_pipe
from onediff_ext.core.errors import OptionError
from onediff_ext.core.options import CompileOptions
from onediff_ext.hosts.diffusers import compile_module as modules
from onediff_ext.hosts.diffusers.compile import compiled_state, undo_compile
from onediff_ext.session.session import Session
from tests.support import models
from tests.support.draw import relative_error

SIZES = ((128, 128), (64, 256), (256, 64))  # width, height; a square and both oblongs


@pytest.fixture
def session(
    make_session: Callable[..., Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Session]:
    """The session that a script without options gets."""
    made = make_session(store=tmp_path / "store")
    monkeypatch.setitem(modules._sessions, CompileOptions(), made)
    yield made
    made.close()


def sdxl_image_to_image() -> Any:
    pipe = StableDiffusionXLImg2ImgPipeline(**models.sdxl().components, add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any, image: Image.Image) -> torch.Tensor:
    pixels: torch.Tensor = pipe(
        "a fox", image=image, strength=0.6, num_inference_steps=4, guidance_scale=1.0,
        generator=torch.Generator().manual_seed(1), output_type="pt",
    ).images  # fmt: skip
    return pixels


def pictures_of_all_sizes(pipe: Any) -> list[torch.Tensor]:
    image = Image.effect_mandelbrot((300, 300), (-2, -1.5, 1, 1.5), 40).convert("RGB")
    return [draw(pipe, image.resize(size)) for size in SIZES]


def article_script(pipeline: Any) -> list[torch.Tensor]:
    """SDXL's img2img with LCM's scheduler, as in OneDiff's article: one assignment per model."""
    pipeline.scheduler = LCMScheduler.from_config(pipeline.scheduler.config)
    pipeline.unet = oneflow_compile(pipeline.unet)
    pipeline.vae.decoder = oneflow_compile(pipeline.vae.decoder)
    return pictures_of_all_sizes(pipeline)


def test_the_articles_script(session: Session) -> None:
    eager, pipeline = sdxl_image_to_image(), sdxl_image_to_image()
    unet, decoder = pipeline.unet, pipeline.vae.decoder
    eager.scheduler = LCMScheduler.from_config(eager.scheduler.config)
    expected = pictures_of_all_sizes(eager)
    article_script(pipeline)
    assert (pipeline.unet, pipeline.vae.decoder) == (unet, decoder)
    kinds = len(session.kinds)
    for found, picture in zip(pictures_of_all_sizes(pipeline), expected, strict=True):
        assert relative_error(found, picture) < 1e-4
    status = session.status()
    assert (status.running, status.reasons) == ("compiled", ())
    assert len(session.kinds) == session.count("built") == kinds > 10  # for all sizes
    before = {name for name, _ in unet.named_modules()}
    for module in (pipeline.unet, pipeline.vae.decoder):
        undo_compile(module)
    assert {name for name, _ in unet.named_modules()} == before
    assert "forward" not in vars(unet).keys() | vars(decoder).keys()


def test_the_loop_over_sizes_then_saved_and_loaded(
    make_session: Callable[..., Session], tmp_path: Path
) -> None:
    """`compile_pipe(pipe, ignores=("vae",))` of OneDiff's answer to recompiles at each size."""
    expected = pictures_of_all_sizes(sdxl_image_to_image())
    first, second = (make_session(store=tmp_path / name) for name in ("one", "other"))

    pipe = compile_pipe(sdxl_image_to_image(), ignores=("vae",), session=first)
    pictures_of_all_sizes(pipe)
    save_pipe(pipe, dir=tmp_path / "cached_pipe")
    undo_compile(pipe)

    again = compile_pipe(sdxl_image_to_image(), ignores=("vae",), session=second)
    load_pipe(again, dir=tmp_path / "cached_pipe")
    state = compiled_state(again)
    assert state is not None
    assert [component.name for component in state.components] == ["unet"]
    pictures_of_all_sizes(again)
    for found, picture in zip(pictures_of_all_sizes(again), expected, strict=True):
        assert relative_error(found, picture) < 1e-4
    assert second.status().running == "compiled"
    undo_compile(again)


# ------------------------------------------------------------------ single modules


def test_modules_with_equal_options_share_a_session(tmp_path: Path) -> None:
    pipe, store = models.sd15(), {"store": tmp_path, "build": "never"}
    for module in (pipe.unet, pipe.vae):
        assert compile_module(module, options=store) is module
    states = [compiled_state(module) for module in (pipe.unet, pipe.vae)]
    session = states[0].session
    assert states[1].session is session
    assert [c.name for c in states[1].components] == ["vae_encoder", "vae_decoder"]
    compile_module(pipe.vae, options=store, backend="eager")
    assert compiled_state(pipe.vae).session is not session
    assert not session.background._closed
    undo_compile(pipe.vae)
    undo_compile(pipe.unet)
    assert session.background._closed
    compile_module(pipe.unet, options=store)
    assert compiled_state(pipe.unet).session is not session
    undo_compile(pipe.unet)


def test_a_model_without_known_blocks_stays_eager(caplog: pytest.LogCaptureFixture) -> None:
    encoder = models.text_encoder()
    before = dict(vars(encoder))
    assert compile_module(encoder) is encoder
    assert vars(encoder) == before
    assert "CLIPTextModel stays eager: it has no known blocks" in caplog.text


def test_without_a_graph_a_model_stays_eager() -> None:
    unet = models.unet()
    before = dict(vars(unet))
    assert oneflow_compile(unet, use_graph=False, dynamic=False) is unet
    assert vars(unet) == before


def test_a_pipeline_is_no_module() -> None:
    with pytest.raises(Exception, match="no module") as error:
        compile_module(models.sd15())  # type: ignore[type-var]
    assert "compile_pipe" in str(vars(error.value))


def test_a_module_and_its_pipeline_may_both_be_compiled(
    make_session: Callable[..., Session],
) -> None:
    pipe, session = models.sd15(), make_session()
    before = {name: id(value) for name, value in vars(pipe.unet).items()}
    compile_module(pipe.unet, session=session)
    compile_pipe(pipe, session=session)
    undo_compile(pipe)
    assert compiled_state(pipe.unet) is not None
    undo_compile(pipe.unet)
    assert {name: id(value) for name, value in vars(pipe.unet).items()} == before


@torch.no_grad()
def test_a_modules_forwards_run_on_two_devices(make_session: Callable[..., Session]) -> None:
    unet = models.unet()
    inputs = models.unet_inputs(unet)
    expected = unet(**inputs).sample
    compile_module(unet, session=make_session(cfg_parallel="cpu", spot_checks=False))
    for _ in range(4):
        assert relative_error(unet(**inputs).sample, expected) < 1e-4
    state = compiled_state(unet)
    assert state is not None
    parallel = state.components[0].cfg_parallel
    assert parallel is not None
    assert parallel.comparisons
    undo_compile(unet)
    assert parallel.replica is None


def test_a_step_cache_is_for_pipelines() -> None:
    unet = models.unet()
    with pytest.raises(OptionError, match="for pipelines"):
        compile_module(unet, options={"step_cache": "first-block"})
    assert compiled_state(unet) is None


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_options_beside_a_session_are_those_of_the_session(
    backend: str | None, make_session: Callable[..., Session]
) -> None:
    """They would change nothing."""
    session, pipe = make_session(), models.sd15()
    other = {"precision": "int8"} if backend is None else None
    for compile_it in (
        lambda **more: compile_pipe(pipe, **more),
        lambda **more: compile_module(pipe.unet, **more),
    ):
        with pytest.raises(OptionError, match="The session has other options"):
            compile_it(session=session, options=other, backend=backend)
        assert compiled_state(pipe) is None
        compile_it(session=session, options=session.options)
        undo_compile(pipe)
        undo_compile(pipe.unet)
    session.close()
