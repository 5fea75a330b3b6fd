"""The graph library in the panel: a table, and what can be done with its rows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from onediff_ext.core.errors import OneDiffError, UntrustedGraphError
from onediff_ext.panel import html, library_actions
from onediff_ext.panel.graph_rows import EVERYTHING, graph_groups
from onediff_ext.panel.panel_host import PanelHost

_TRUST = "I trust whoever made this archive: its graphs are native code that will run here."
_SURE = "Delete for good"


def build_library(port: PanelHost, elem_id: Callable[[str], str]) -> None:
    """Make the closed part with the table and its actions; nothing is read before it is opened."""
    with gr.Accordion("Graph library", open=False, elem_id=elem_id("library")):
        table = gr.HTML("", elem_id=elem_id("library_table"))
        with gr.Row():
            refresh = gr.Button("Refresh", size="sm", elem_id=elem_id("library_refresh"))
            verify = gr.Button("Verify all", size="sm", elem_id=elem_id("library_verify"))
        of = gr.Dropdown(
            label="Graphs of",
            choices=[EVERYTHING],
            value=EVERYTHING,
            elem_id=elem_id("library_of"),
        )
        with gr.Row():
            export = gr.Button("Export", size="sm", elem_id=elem_id("library_export"))
            sure = gr.Checkbox(False, label=_SURE, elem_id=elem_id("library_sure"))
            delete = gr.Button(
                "Delete", size="sm", variant="stop", elem_id=elem_id("library_delete")
            )
        exported = gr.File(label="Exported", visible=False, elem_id=elem_id("library_exported"))
        why_no_import = port.why_no_import()
        if why_no_import is None:
            archive = gr.File(
                label="Archive to import", file_types=[".zip"], elem_id=elem_id("library_archive")
            )
            trust = gr.Checkbox(False, label=_TRUST, elem_id=elem_id("library_trust"))
            take = gr.Button("Import", size="sm", elem_id=elem_id("library_import"))
        else:
            gr.HTML(html.message(why_no_import), elem_id=elem_id("library_no_import"))
        said = gr.HTML("", elem_id=elem_id("library_message"))

    def listed(name: str, text: str) -> list[Any]:
        library = port.library()
        groups = graph_groups(library, port.machine())
        names = [EVERYTHING, *(group.name for group in groups)]
        kept = name if name in names else EVERYTHING
        rows = html.graph_table(groups, library.folder.root, library.limit_bytes)
        return [rows, gr.update(choices=names, value=kept), html.message(text)]

    def attempt(name: str, action: Callable[[], str]) -> list[Any]:
        try:
            return listed(name, action())
        except OneDiffError as exc:
            return [gr.update(), gr.update(), html.error(exc)]

    def show(name: str) -> list[Any]:
        return attempt(name, lambda: "")

    def on_delete(name: str, is_sure: bool) -> list[Any]:
        if not is_sure:
            return [gr.update(), gr.update(), html.message(f'Tick "{_SURE}" first.'), gr.update()]
        return [*attempt(name, lambda: library_actions.delete(port.library(), name)), False]

    exports: list[tempfile.TemporaryDirectory[str]] = []

    def on_export(name: str) -> list[Any]:
        # Gradio has its own copy of the one before. Kept ones would fill the disk, press by press.
        while exports:
            exports.pop().cleanup()
        # In the temporary folder: Gradio hands out no other file.
        folder = tempfile.TemporaryDirectory(prefix="onediff-export-")
        exports.append(folder)
        try:
            path = library_actions.export(port.library(), name, Path(folder.name))
        except OneDiffError as exc:
            return [gr.update(), html.error(exc)]
        return [gr.update(value=str(path), visible=True), html.message(f"{path.name} is ready.")]

    def on_import(name: str, file: Any, trusted: bool) -> list[Any]:
        refused = port.why_no_import()
        if refused is not None:
            return [gr.update(), gr.update(), html.message(refused), False]
        path = getattr(file, "name", file)  # Gradio 3 hands an open file over, 4 its path
        if path and not trusted:
            doubt = UntrustedGraphError("Nothing was imported.", f'Tick "{_TRUST}" first.')
            return [gr.update(), gr.update(), html.error(doubt), False]
        return [
            *attempt(name, lambda: library_actions.import_archive(port.library(), path, trusted)),
            False,
        ]

    shown = [table, of, said]
    refresh.click(show, inputs=[of], outputs=shown, show_progress="hidden")
    verify.click(
        lambda name: attempt(name, lambda: library_actions.verify(port.library())),
        inputs=[of],
        outputs=shown,
        show_progress="hidden",
    )
    delete.click(on_delete, inputs=[of, sure], outputs=[*shown, sure], show_progress="hidden")
    export.click(on_export, inputs=[of], outputs=[exported, said], show_progress="hidden")
    if why_no_import is None:
        take.click(
            on_import,
            inputs=[of, archive, trust],
            outputs=[*shown, trust],
            show_progress="hidden",
        )
