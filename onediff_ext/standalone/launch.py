"""Connects the application with the page and serves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from onediff_ext.core.demo_files import DEMO_MODEL, DEMO_PHOTOS
from onediff_ext.core.options import CompileOptions
from onediff_ext.pictures.writing import make_folder
from onediff_ext.standalone.app import StandaloneApp
from onediff_ext.standalone.page import Page, PageDefaults, build_page
from onediff_ext.standalone.page_events import PageEvents
from onediff_ext.standalone.page_server import launch
from onediff_ext.standalone.serving import Serving

if TYPE_CHECKING:
    import torch

_SIDES_PX = {"sd1": 512, "sd2": 768, "sdxl": 1024, "sdxl-refiner": 1024}
_EXAMPLES = (
    "a fox in the snow",
    "a cat and a rocket on a yellow background",
    "an octopus under the sea",
    "two apples",
    "a castle at sunset",
)


def serve(
    model: Path,
    *,
    device: torch.device,
    dtype_name: str,
    options: CompileOptions,
    loras: Sequence[tuple[Path, float]],
    output_dir: Path,
    serving: Serving,
    vae_tiling: str = "auto",
) -> None:
    """Load a checkpoint and serve the page until the process ends.

    Raises:
        OneDiffError: The checkpoint or a LoRA cannot be loaded, or the output folder is not
            writable.
    """
    make_folder(output_dir)
    standalone_app = StandaloneApp(device, dtype_name, options, vae_tiling)
    standalone_app.load(model, loras)
    page = make_page(standalone_app, output_dir.resolve(), is_local=serving.is_local)
    try:
        launch(page, serving)
    finally:
        standalone_app.close()


def make_page(standalone_app: StandaloneApp, output_dir: Path, *, is_local: bool = True) -> Page:
    """Build the page with its events, for an application with a loaded checkpoint.

    Args:
        standalone_app: Draws.
        output_dir: The folder of the images.
        is_local: Only this machine's own users reach it, so they may name files and folders.
    """
    defaults = replace(_defaults(standalone_app, output_dir), is_local=is_local)
    page = build_page(standalone_app, defaults)
    PageEvents(page, standalone_app, defaults).connect()
    return page


def _defaults(standalone_app: StandaloneApp, output_dir: Path) -> PageDefaults:
    checkpoint = standalone_app.loaded().checkpoint
    defaults = PageDefaults(
        model=checkpoint.path,
        output_dir=output_dir,
        side_px=_SIDES_PX.get(checkpoint.architecture, 512),
    )
    if (model := checkpoint.transformer_model) is not None:
        return replace(
            defaults, steps=model.steps, guidance=model.guidance, sampler="Euler", side_px=1024
        )
    if checkpoint.path.resolve() != DEMO_MODEL.resolve():
        return defaults
    return replace(
        defaults,
        input_dir=str(DEMO_PHOTOS) if DEMO_PHOTOS.is_dir() else "",
        prompt=_EXAMPLES[0],
        steps=16,
        guidance=4.0,
        sampler="DPM++ 2M Karras",
        side_px=192,
        size_rule="scale:0.375",
        examples=_EXAMPLES,
    )
