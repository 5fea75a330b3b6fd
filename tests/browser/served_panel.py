"""A page that hosts only the panel, as a WebUI's accordion does: run by any Gradio's Python.

It needs Gradio alone. The status is read from a file, so a test changes it while the page is open.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr

from onediff_ext.core.status import Status
from onediff_ext.panel import html
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.gradio_versions import accepted
from onediff_ext.panel.panel import build_panel
from onediff_ext.panel.panel_host import PanelHost
from onediff_ext.panel.phrases import Phrases, phrases_in
from onediff_ext.panel.size_source import tab_sources
from onediff_ext.panel.status_view import StatusView
from onediff_ext.store import GraphLibrary

ROOT = Path(__file__).resolve().parents[2]
ACCORDION = "onediff_txt2img"
# As a WebUI's page does it: a tick and our header move into the accordion's own head.
_PAGE_SCRIPT = """
() => {
  window.gradioApp = () => document;
  window.onUiLoaded = start => start();
  const head = document.querySelector('#onediff_txt2img > .label-wrap');
  const box = document.querySelector('#onediff_txt2img-checkbox input');
  const extra = document.querySelector('#onediff_txt2img-extra');
  const tick = document.createElement('input');
  tick.type = 'checkbox';
  tick.id = 'onediff_txt2img-visible-checkbox';
  tick.checked = true;
  tick.style.marginRight = '.5em';
  tick.addEventListener('click', event => { event.stopPropagation(); box.click(); });
  head.querySelector('span').prepend(tick);
  head.insertBefore(extra, head.lastElementChild);
  /* panel's own script */
}
"""
_PAGE_CSS = """
.input-accordion-extra { flex: 0 0 auto !important; margin: 0 .5em 0 auto; }
.gradio-container { max-width: none !important; }
.hidden-tick { display: none !important; }
/* The same letters on every machine that has this common font. */
.gradio-container, .gradio-container * { font-family: "DejaVu Sans", sans-serif !important; }
"""
_CSS = _PAGE_CSS + html.style_sheet()


class FilePanelHost(PanelHost):
    """Its status and language are those of ``status.json`` in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self._folder / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def status(self) -> Status:
        fields = dict(self._read().get("status", {}))
        for name in ("eager_blocks", "changed_by"):
            fields[name] = tuple(map(tuple, fields.get(name, ())))
        for name in ("reasons", "notes"):
            fields[name] = tuple(fields.get(name, ()))
        return Status(**fields)

    def phrases(self) -> Phrases:
        return phrases_in(self._read().get("language", ""))

    def warm_up(self, choices: Choices) -> Iterator[str]:
        shapes = self.warm_up_shapes(choices)
        for shape in shapes:
            self._note(f"built for {shape}")
            yield ""
            time.sleep(0.1)
        while self._read().get("warms_up"):  # a test lets it go on
            yield ""
            time.sleep(0.1)
        yield f"done for {choices.sizes}"

    def cancel(self) -> None:
        self._note("cancelled")

    def pause(self) -> None:
        self._note("paused")

    def go_on(self) -> None:
        self._note("goes on")

    def library(self) -> GraphLibrary:
        return GraphLibrary(self._folder / "store", 10**9)

    def machine(self) -> str:
        return "machine"

    def memory_note(self) -> str | None:
        found: str | None = self._read().get("memory")
        return found

    def device(self) -> Any:
        return SimpleNamespace(type="cuda")

    def missing_reason(self) -> str | None:
        return None

    def picture_folders(self) -> Sequence[Path]:
        return ()

    def _note(self, text: str) -> None:
        with (self._folder / "done.txt").open("a") as file:
            file.write(f"{text}\n")


def build(folder: Path) -> Any:
    """The page: sliders of two tabs, and the panel in an accordion."""
    host = FilePanelHost(folder)

    def elem_id(name: str) -> str:
        return f"{ACCORDION}_{name}"

    with gr.Blocks(analytics_enabled=False, **accepted(gr.Blocks, css=_CSS)) as blocks:
        for tab, sides in (("txt2img", (513, 764)), ("img2img", (640, 448))):
            with gr.Row():
                gr.Slider(64, 2048, value=sides[0], label=f"{tab} width", elem_id=f"{tab}_width")
                gr.Slider(64, 2048, value=sides[1], label=f"{tab} height", elem_id=f"{tab}_height")
                gr.Slider(1, 8, value=2, label=f"{tab} batch", elem_id=f"{tab}_batch_size")
        enabled = gr.Checkbox(
            True, label="tick", elem_id=f"{ACCORDION}-checkbox", elem_classes=["hidden-tick"]
        )
        with gr.Accordion("OneDiff", open=True, elem_id=ACCORDION, elem_classes="input-accordion"):
            with gr.Column(
                elem_id=f"{ACCORDION}-extra", elem_classes="input-accordion-extra", min_width=0
            ):
                header = gr.HTML(
                    StatusView(host).header(enabled=True),
                    elem_id=elem_id("header"),
                    elem_classes=["onediff-header-status"],
                )
            panel = build_panel(host, enabled, header, elem_id, tab_sources("txt2img", "img2img"))
            button = gr.Button("", elem_id=elem_id("refresh"), elem_classes=["onediff-hidden"])
            button.click(
                panel.show_status,
                inputs=[enabled],
                outputs=panel.status_outputs,
                queue=False,
                show_progress="hidden",
            )
        script = (ROOT / "javascript/onediff.js").read_text(encoding="utf-8")
        script = _PAGE_SCRIPT.replace("/* panel's own script */", script)
        name = "_js" if gr.__version__.startswith("3.") else "js"
        blocks.load(None, None, None, **{name: script})
    return blocks


def main(folder: Path, port: int) -> None:
    """Serve the page until the process ends.

    Args:
        folder: Of ``status.json`` and the store.
        port: On this machine.
    """
    blocks = build(folder)
    look = accepted(blocks.launch, css=_CSS, ssr_mode=False, show_api=False)
    blocks.queue().launch(server_name="127.0.0.1", server_port=port, quiet=True, **look)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
