"""The graph library in the panel: a table of the stored graphs, actions on them, and imports."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from onediff_ext.core.errors import OneDiffError, UntrustedGraphError
from onediff_ext.panel import html, library_actions
from onediff_ext.panel.gradio_versions import on_expand
from onediff_ext.panel.graph_rows import EVERYTHING, graph_groups
from onediff_ext.panel.panel_host import PanelHost

_TRUST = "I trust the author of this archive: its graphs are native code that will run here."
_SURE = "Delete for good"


class LibraryPanel:
    """Two closed accordions: the stored graphs, and the import of an archive.

    Args:
        panel_host: Owns the store.
        elem_id: Makes an element's id from a name.
    """

    def __init__(self, panel_host: PanelHost, elem_id: Callable[[str], str]) -> None:
        self._host = panel_host
        self._exports: list[tempfile.TemporaryDirectory[str]] = []
        with gr.Accordion("Graph library", open=False, elem_id=elem_id("library")) as accordion:
            table = gr.HTML("", elem_id=elem_id("library_table"))
            self._of = gr.Dropdown(
                label="Graphs of",
                choices=[EVERYTHING],
                value=EVERYTHING,
                elem_id=elem_id("library_of"),
            )
            said = gr.HTML("", elem_id=elem_id("library_message"))
            self._shown = [table, self._of, said]
            # The table fills when the accordion opens: see `on_expand`.
            with gr.Row(elem_classes=["onediff-buttons"]):
                refresh = gr.Button("Refresh", size="sm", elem_id=elem_id("library_refresh"))
                verify = gr.Button("Verify all", size="sm", elem_id=elem_id("library_verify"))
                export = gr.Button("Export", size="sm", elem_id=elem_id("library_export"))
            exported = gr.File(label="Exported", visible=False, elem_id=elem_id("library_exported"))
            with gr.Row(elem_classes=["onediff-buttons"]):
                sure = gr.Checkbox(False, label=_SURE, elem_id=elem_id("library_sure"))
                delete = gr.Button(
                    "Delete", size="sm", variant="stop", elem_id=elem_id("library_delete")
                )
        events: dict[str, Any] = {
            "inputs": [self._of],
            "outputs": self._shown,
            "show_progress": "hidden",
        }
        refresh.click(self.show, **events)
        on_expand(accordion, self.show, **events)
        verify.click(self.on_verify, **events)
        export.click(
            self.on_export, inputs=[self._of], outputs=[exported, said], show_progress="hidden"
        )
        delete.click(
            self.on_delete,
            inputs=[self._of, sure],
            outputs=[*self._shown, sure],
            show_progress="hidden",
        )
        self._build_import(elem_id)

    def _build_import(self, elem_id: Callable[[str], str]) -> None:
        with gr.Accordion("Import graphs", open=False, elem_id=elem_id("import")):
            off_reason = self._host.no_import_reason()
            if off_reason is not None:
                gr.HTML(html.message(off_reason), elem_id=elem_id("library_no_import"))
                return
            archive = gr.File(
                label="Archive to import", file_types=[".zip"], elem_id=elem_id("library_archive")
            )
            trust = gr.Checkbox(False, label=_TRUST, elem_id=elem_id("library_trust"))
            take = gr.Button("Import", size="sm", elem_id=elem_id("library_import"))
            said = gr.HTML("", elem_id=elem_id("import_message"))
        take.click(
            self.on_import,
            inputs=[self._of, archive, trust],
            outputs=[*self._shown[:2], said, trust],
            show_progress="hidden",
        )

    def show(self, name: str) -> list[Any]:
        """Return the table, the names of its groups and an empty message.

        Args:
            name: The chosen group.
        """
        return self._attempt(name, lambda: "")

    def _listed(self, name: str, text: str) -> list[Any]:
        library = self._host.library()
        groups = graph_groups(library, self._host.machine())
        names = [EVERYTHING, *(group.name for group in groups)]
        kept = name if name in names else EVERYTHING
        root, words = library.folder.root, self._host.phrases()
        rows = html.graph_table(groups, root, library.limit_bytes, words)
        return [rows, gr.update(choices=names, value=kept), html.message(text, words)]

    def _attempt(self, name: str, action: Callable[[], str]) -> list[Any]:
        try:
            return self._listed(name, action())
        except OneDiffError as exc:
            return [gr.update(), gr.update(), html.error(exc, self._host.phrases())]

    def on_verify(self, name: str) -> list[Any]:
        """Check and mend the store."""
        verify, words = library_actions.verify, self._host.phrases()
        return self._attempt(name, lambda: verify(self._host.library(), words))

    def on_delete(self, name: str, is_sure: bool) -> list[Any]:
        """Delete the graphs of a group, once the user is sure."""
        words = self._host.phrases()
        if not is_sure:
            shown = html.message(f'Tick "{_SURE}" first.', words)
            return [gr.update(), gr.update(), shown, gr.update()]
        delete = library_actions.delete
        return [*self._attempt(name, lambda: delete(self._host.library(), name, words)), False]

    def on_export(self, name: str) -> list[Any]:
        """Make an archive of a group's graphs for download."""
        # Gradio has its own copy of the one before. Kept ones would fill the disk, press by press.
        while self._exports:
            self._exports.pop().cleanup()
        # In the temporary folder: Gradio hands out no other file.
        folder = tempfile.TemporaryDirectory(prefix="onediff-export-")
        self._exports.append(folder)
        try:
            path = library_actions.export(self._host.library(), name, Path(folder.name))
        except OneDiffError as exc:
            return [gr.update(), html.error(exc, self._host.phrases())]
        shown = html.message(f"{path.name} is ready.", self._host.phrases())
        return [gr.update(value=str(path), visible=True), shown]

    def on_import(self, name: str, file: Any, trusted: bool) -> list[Any]:
        """Import the graphs of an archive whose author the user trusts."""
        words, off_reason = self._host.phrases(), self._host.no_import_reason()
        if off_reason is not None:
            return [gr.update(), gr.update(), html.message(off_reason, words), False]
        path = getattr(file, "name", file)  # Gradio 3 passes an open file, Gradio 4 its path
        if path and not trusted:
            untrusted = UntrustedGraphError("Nothing was imported.", f'Tick "{_TRUST}" first.')
            return [gr.update(), gr.update(), html.error(untrusted, words), False]
        take = library_actions.import_archive
        shown = self._attempt(name, lambda: take(self._host.library(), path, trusted, words))
        return [*shown, False]
