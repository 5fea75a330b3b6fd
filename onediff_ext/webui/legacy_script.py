"""OneDiff's selectable script under its old name, for API calls that name it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gradio as gr
from modules import processing, scripts

from onediff_ext.webui.xyz import AXIS_ATTRIBUTE

OLD_NAME = "onediff_diffusion_model"


class OldNameScript(scripts.Script):
    """Draws the job with OneDiff on; everything else is as the accordion says."""

    def title(self) -> str:
        return OLD_NAME

    def ui(self, is_img2img: bool) -> list[Any]:  # noqa: ARG002
        gr.HTML('Turns OneDiff on for this job. The accordion "OneDiff" does the same.')
        return []

    def run(self, p: Any, *args: Any) -> Any:  # noqa: ARG002
        """Whatever arguments earlier versions took are passed over."""
        with enabled(p):
            return processing.process_images(p)


@contextmanager
def enabled(p: Any) -> Iterator[None]:
    """Let a job run with OneDiff on, for the length of a ``with`` block."""
    before = getattr(p, AXIS_ATTRIBUTE, None)
    setattr(p, AXIS_ATTRIBUTE, {**(before or {}), "enabled": True})
    try:
        yield
    finally:
        if before is None:
            delattr(p, AXIS_ATTRIBUTE)
        else:
            setattr(p, AXIS_ATTRIBUTE, before)
