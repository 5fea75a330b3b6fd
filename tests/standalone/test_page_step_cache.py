"""The stand-alone page's step cache, with a small Flux.1: pictures, a folder, and the infotext."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from onediff_ext.core.errors import OptionError
from onediff_ext.core.options import CompileOptions
from onediff_ext.panel.choices import Choices
from onediff_ext.pictures.png_chunks import INFOTEXT_KEYWORD, read_png
from tests.support.transformer_folders import save_folder

gradio = pytest.importorskip("gradio", reason="the page needs gradio, which is not installed")


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page's events over an application that draws eager."""
    import torch

    from onediff_ext.standalone.app import StandaloneApp
    from onediff_ext.standalone.page import PageDefaults
    from onediff_ext.standalone.page_events import PageEvents

    folder = tmp_path_factory.mktemp("page")
    app = StandaloneApp(
        torch.device("cpu"), "auto", CompileOptions(store=folder / "store", build="never")
    )
    app.load(save_folder("flux", folder / "flux"))
    page: Any = None  # is not shown
    yield PageEvents(page, app, PageDefaults(folder / "flux", folder / "out"))
    app.close()


def picture(step_cache: str) -> dict[str, Any]:
    """The page's fields."""
    return {
        "prompt": "a fox", "negative": "", "sampler": "Euler", "steps": 4, "guidance": 3.0,
        "seed": 5, "batch": 1, "step_cache": step_cache,
    }  # fmt: skip


def infotext(path: Path) -> str:
    return read_png(path).texts[INFOTEXT_KEYWORD]


def test_pictures_differ_and_say_why(events: Any) -> None:
    choices = Choices(enabled=False)
    drawn = [
        events._draw_text(choices, picture(cache), 64, 64, lambda *_: None).paths[0]
        for cache in ("off", "first-block:0.9")
    ]
    assert "step cache" not in infotext(drawn[0])
    assert 'OneDiff step cache: "first-block:0.9"' in infotext(drawn[1])
    plain, cached = (Image.open(path).tobytes() for path in drawn)
    assert plain != cached


def test_a_folder_has_it_in_its_job(events: Any, tmp_path: Path) -> None:
    """So a run with another cache draws again; image to image says that there is none."""
    own = {
        "source": f'"{tmp_path}"', "target": f" {tmp_path / 'out'} ",
        "strength": 0.5, "size": "own", "recursive": False, "captions": False,
        "vary_seed": False, "keep_alpha": False,
    }  # fmt: skip
    job = events._folder_job(Choices(enabled=False), picture("taylorseer-lite:3"), own)
    assert str(job.settings.step_cache) == "taylorseer-lite:3"
    assert (job.batch.inputs, job.batch.output_dir) == ([tmp_path], tmp_path / "out")
    with pytest.raises(OptionError, match="runs without step caches"):
        events.standalone_app.loaded().check(job.settings, "img2img")


def test_guidance_steps_are_those_of_the_panel_where_it_is_on(events: Any, tmp_path: Path) -> None:
    own = {
        "source": str(tmp_path), "target": str(tmp_path / "out"), "strength": 0.5, "size": "own",
        "recursive": False, "captions": False, "vary_seed": False, "keep_alpha": False,
    }  # fmt: skip
    for enabled, text in ((True, "interval:0-0.6"), (False, "off")):
        choices = Choices(enabled=enabled, preset="Custom", guidance_steps="interval:0-0.6")
        job = events._folder_job(choices, picture("off"), own)
        assert str(job.settings.guidance_steps) == text
        assert ("guidance_steps" in job.identity) == enabled
    choices = Choices(enabled=True, preset="Custom", guidance_steps="adaptive")
    with pytest.raises(OptionError, match="FluxPipeline is not known to draw"):
        events._draw_text(choices, picture("off"), 64, 64, lambda *_: None)


def test_a_cache_that_there_is_not_is_refused(events: Any) -> None:
    with pytest.raises(OptionError, match="no step cache 'teacache'"):
        events._draw_text(Choices(enabled=False), picture("teacache"), 64, 64, lambda *_: None)
