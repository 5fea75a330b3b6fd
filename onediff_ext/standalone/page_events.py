"""The events of the stand-alone page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.processing_utils import save_file_to_cache

from onediff_ext.core.deepcache_options import OFF, DeepCacheOptions
from onediff_ext.core.errors import OneDiffError, OptionError
from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.core.step_cache_options import StepCacheOptions
from onediff_ext.core.typed_paths import typed_path
from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
from onediff_ext.hosts.diffusers.jobs.img2img_job import Img2ImgJob
from onediff_ext.hosts.diffusers.jobs.model_identity import earlier_identities
from onediff_ext.hosts.diffusers.lora.lora_option import parse_lora_lines
from onediff_ext.panel import html
from onediff_ext.panel.choices import Choices, from_arguments
from onediff_ext.panel.fields import FIELDS
from onediff_ext.panel.gpu_choices import ONE
from onediff_ext.panel.gradio_versions import accepted
from onediff_ext.pictures.batch.batch_job import BatchJob
from onediff_ext.pictures.png_chunks import INFOTEXT_KEYWORD, read_png
from onediff_ext.pictures.size_rules import parse_size_rule
from onediff_ext.standalone.app import StandaloneApp
from onediff_ext.standalone.checkpoint_list import known_models
from onediff_ext.standalone.drawing_tabs import Result, chosen_seed, from_picture, from_text
from onediff_ext.standalone.folder_job import run_folder
from onediff_ext.standalone.folder_on_gpus import run_folder_on_gpus
from onediff_ext.standalone.folder_progress import FolderProgress, progress_html
from onediff_ext.standalone.page import Page, PageDefaults
from onediff_ext.standalone.page_language import visitors_phrases

_PICTURE = ("prompt", "negative", "sampler", "steps", "guidance", "seed", "batch", "step_cache")
_FOLDER = (
    "source",
    "target",
    "strength",
    "size",
    "recursive",
    "captions",
    "vary_seed",
    "keep_alpha",
    "gpus",
)
_SHOWN_RESULTS = 30
Values = dict[str, Any]


class PageEvents:
    """Connects the page with the application.

    Args:
        page: From `build_page`.
        standalone_app: Draws.
        defaults: Output folder, and whether the page is local.
    """

    def __init__(self, page: Page, standalone_app: StandaloneApp, defaults: PageDefaults) -> None:
        self.page, self.standalone_app, self.defaults = page, standalone_app, defaults

    def connect(self) -> None:
        """Connect every button; the panel's own buttons are connected already."""
        page = self.page
        with page.blocks:
            self._on_draw("txt2img", page.text, ("width", "height"), self._draw_text)
            self._on_draw("img2img", page.image, ("source", "strength", "size"), self._draw_image)
            if page.folder:
                self._on_folder()
            for event in (page.model["load"].click, page.model["checkpoint"].input):
                event(
                    self._load,
                    inputs=[
                        page.model["checkpoint"],
                        page.model["loras"],
                        page.panel.controls["enabled"],
                    ],
                    outputs=[page.result["said"], *page.panel.status_outputs],
                    api_name="load",
                )
            page.result["gallery"].select(
                self._show_infotext, inputs=[page.result["gallery"]], outputs=[page.result["info"]]
            )

    def _on_draw(
        self, name: str, tab: Values, names: tuple[str, ...], draw: Callable[..., Result]
    ) -> None:
        page = self.page
        result = page.result
        count = len(FIELDS)

        def run(*values: Any, progress: gr.Progress = gr.Progress()) -> list[Any]:  # noqa: B008
            words = visitors_phrases()
            try:
                choices, notes = Choices.for_picture(from_arguments(values[:count]))
                picture = dict(zip(_PICTURE, values[count:], strict=False))
                own = values[count + len(_PICTURE) :]

                def on_step(step: int, of: int) -> None:
                    progress((step, of), desc="drawing", unit="steps")

                done = draw(choices, picture, *own, on_step)
            except OneDiffError as exc:
                shown = html.error(exc, words)
                return [gr.update(), shown, gr.update(), *self._status(values[0])]
            said = " ".join(map(words.translated, done.said))
            return [
                [self._shown(path) for path in done.paths],
                html.message("\n".join([said, *notes]), words),
                _infotext_of(done.paths[0]),
                *self._status(values[0]),
            ]

        inputs = [
            *page.panel.inputs,
            *(page.picture[name] for name in _PICTURE),
            *(tab[name] for name in names),
        ]
        outputs = [result["gallery"], result["said"], result["info"], *page.panel.status_outputs]
        tab["go"].click(
            run,
            inputs=inputs,
            outputs=outputs,
            api_name=name,
            **accepted(tab["go"].click, show_progress_on=result["gallery"]),
        )
        self._on_interrupt(tab)

    def _on_interrupt(self, tab: Values) -> None:
        def interrupt() -> str:
            if not self.standalone_app.cancel():
                return html.message("There is nothing to interrupt.")
            return html.message("Stopping at the next step.")

        tab["interrupt"].click(
            interrupt, outputs=[self.page.result["said"]], queue=False, show_progress="hidden"
        )

    def _draw_text(
        self, choices: Choices, picture: Values, width: float, height: float, on_step: Any
    ) -> Result:
        return from_text(
            self.standalone_app,
            choices,
            _settings(choices, picture),
            _whole(width, "width"),
            _whole(height, "height"),
            _whole(picture["batch"], "number of pictures"),
            chosen_seed(picture["seed"]),
            self.defaults.output_dir,
            on_step,
        )

    def _draw_image(
        self,
        choices: Choices,
        picture: Values,
        source: str | None,
        strength: float,
        size: str,
        on_step: Any,
    ) -> Result:
        return from_picture(
            self.standalone_app,
            choices,
            _settings(choices, picture, strength),
            Path(source) if source else None,
            size or "own",
            _whole(picture["batch"], "number of pictures"),
            chosen_seed(picture["seed"]),
            self.defaults.output_dir,
            on_step,
        )

    def _on_folder(self) -> None:
        page, count = self.page, len(FIELDS)
        tab = page.folder

        def run(*values: Any) -> Iterator[list[Any]]:
            words = visitors_phrases()
            try:
                choices, notes = Choices.for_picture(from_arguments(values[:count]))
                ignored = html.message("\n".join(notes), words)
                picture = dict(zip(_PICTURE, values[count:], strict=False))
                own = dict(zip(_FOLDER, values[count + len(_PICTURE) :], strict=True))
                job = self._folder_job(choices, picture, own)
                for progress in self._progress_of(job, choices, own["gpus"] or ONE):
                    shown = [self._shown(path) for path in progress.paths[-_SHOWN_RESULTS:]]
                    said = progress_html(progress, words) + ignored
                    yield [said, shown, *self._status(values[0])]
            except OneDiffError as exc:
                yield [html.error(exc, words), gr.update(), *self._status(values[0])]

        inputs = [
            *page.panel.inputs,
            *(page.picture[name] for name in _PICTURE),
            *(tab[name] for name in _FOLDER),
        ]
        outputs = [tab["progress"], page.result["gallery"], *page.panel.status_outputs]
        tab["go"].click(
            run, inputs=inputs, outputs=outputs, api_name="batch", show_progress="hidden"
        )
        self._on_interrupt(tab)

    def _progress_of(
        self, job: Img2ImgJob, choices: Choices, gpus: str
    ) -> Iterator[FolderProgress]:
        if gpus == ONE:
            return run_folder(self.standalone_app, choices, job)
        return run_folder_on_gpus(self.standalone_app, choices, job, gpus)

    def _folder_job(self, choices: Choices, picture: Values, own: Values) -> Img2ImgJob:
        source, target = typed_path(own["source"]), typed_path(own["target"])
        if source is None:
            raise OptionError("No input folder is given.", "Write the path of a folder.")
        if target is None:
            raise OptionError("No output folder is given.", "Write the path of a folder.")
        batch = BatchJob(
            inputs=[source],
            output_dir=target,
            size_rule=parse_size_rule(own["size"] or "own"),
            seed=chosen_seed(picture["seed"]),
            vary_seed=own["vary_seed"],
            batch_size=_whole(picture["batch"], "number of pictures"),
            recursive=own["recursive"],
            captions=own["captions"],
            keep_alpha=own["keep_alpha"],
        )
        settings = _settings(choices, picture, own["strength"])
        identity = {**self.standalone_app.identity, **choices.changes()}
        earlier = earlier_identities(identity, str(self.standalone_app.dtype))
        return Img2ImgJob(batch, settings, identity, earlier)

    def _load(self, checkpoint: str, loras: str, enabled: bool) -> list[Any]:
        words = visitors_phrases()
        try:
            if not self.defaults.is_local:
                self._refuse_other_files(checkpoint, loras)
            path = typed_path(checkpoint) or Path()
            self.standalone_app.load(path, parse_lora_lines(loras or ""))
        except OneDiffError as exc:
            return [html.error(exc, words), *self._status(enabled)]
        name = self.standalone_app.loaded().checkpoint.name
        return [html.message(f"{name} is loaded.", words), *self._status(enabled)]

    def _refuse_other_files(self, checkpoint: str, loras: str) -> None:
        if checkpoint not in known_models(self.defaults.model) or (loras or "").strip():
            raise OptionError(
                "Only the page's own checkpoints can be loaded, as others can reach it.",
                "Choose one of the list.",
            )

    def _shown(self, path: Path) -> str:
        """Copy an image into Gradio's cache and return the copy.

        Gradio serves its cache only, so visitors see the images of this page and no other files
        of the output folder.
        """
        cache = self.page.result["gallery"].GRADIO_CACHE
        return str(save_file_to_cache(path, cache))

    def _show_infotext(self, shown: Any, event: gr.SelectData) -> str:
        try:
            return _infotext_of(Path(shown[event.index][0]))
        except (OSError, IndexError, TypeError):
            return ""

    def _status(self, enabled: bool) -> list[str]:
        return self.page.panel.show_status(enabled)


def _settings(choices: Choices, picture: Values, strength: float = 0.6) -> DrawSettings:
    return DrawSettings(
        prompt=picture["prompt"] or "",
        negative_prompt=picture["negative"] or "",
        steps=_whole(picture["steps"], "number of steps"),
        guidance=float(_given(picture["guidance"], "guidance")),
        strength=float(_given(strength, "strength")),
        scheduler=picture["sampler"],
        deepcache=DeepCacheOptions.parse(choices.deepcache) if choices.enabled else OFF,
        step_cache=StepCacheOptions.parse(picture["step_cache"] or "off"),
        guidance_steps=GuidanceOptions.parse(choices.guidance_steps if choices.enabled else "off"),
    )


def _whole(value: float | None, name: str) -> int:
    return int(_given(value, name))


def _given(value: float | None, name: str) -> float:
    """Return a number of the page.

    Raises:
        OptionError: The user has emptied the box.
    """
    if value is None:
        raise OptionError(f"The {name} is missing.", "Write a number.")
    return value


def _infotext_of(path: Path) -> str:
    return read_png(path).texts.get(INFOTEXT_KEYWORD, "")
