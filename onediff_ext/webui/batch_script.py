"""The selectable script "OneDiff: img2img batch across resolutions"."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
from modules import processing, scripts, sd_models, shared

from onediff_ext.core.errors import OneDiffError, OptionError, PictureError
from onediff_ext.core.typed_paths import typed_path
from onediff_ext.panel.gpu_choices import chosen_gpu_count, gpu_choices
from onediff_ext.pictures.batch.batch_job import BatchJob
from onediff_ext.pictures.naming import NameTemplate
from onediff_ext.pictures.size_rules import parse_size_rule
from onediff_ext.webui.always_visible import changes_of_job
from onediff_ext.webui.batch_arguments import BY_NAME, read_arguments
from onediff_ext.webui.batch_job import BatchResult, run_batch_job
from onediff_ext.webui.host_access import hides_folders
from onediff_ext.webui.other_gpus.drawer import drawers_on_other_gpus
from onediff_ext.webui.seeded_drawing import draw_seeded

TITLE = "OneDiff: img2img batch across resolutions"
_SLIDER_PICTURES = 16
_UNUSABLE = 422  # HTTP's "unprocessable content"


class BatchScript(scripts.Script):
    """Draws every picture of a folder at its own size, equal sizes in one batch."""

    def title(self) -> str:
        return TITLE

    def show(self, is_img2img: bool) -> bool:
        # The host hides its own batch tab too: visitors must not name folders of this machine.
        return is_img2img and not hides_folders(shared.cmd_opts)

    def ui(self, is_img2img: bool) -> list[Any]:  # noqa: ARG002
        source, target = self._textbox("input"), self._textbox("output")
        with gr.Row():
            size_field, batch_field = BY_NAME["size"], BY_NAME["batch"]
            size = gr.Dropdown(
                label=size_field.label,
                info=size_field.help,
                choices=list(size_field.choices),
                value=size_field.default,
                allow_custom_value=True,
                elem_id=self.elem_id("size"),
            )
            batch = gr.Slider(
                1,
                _SLIDER_PICTURES,
                value=batch_field.default,
                step=1,
                label=batch_field.label,
                info=batch_field.help,
                elem_id=self.elem_id("batch"),
            )
        with gr.Row():
            recursive, captions = self._checkbox("recursive"), self._checkbox("captions")
        with gr.Row():
            vary_seed, keep_alpha = self._checkbox("vary_seed"), self._checkbox("keep_alpha")
        name, gpus = self._textbox("name"), self._gpus()
        return [source, target, size, batch, recursive, captions, vary_seed, keep_alpha, name, gpus]

    def _textbox(self, name: str) -> Any:
        field = BY_NAME[name]
        return gr.Textbox(
            field.default, label=field.label, info=field.help, elem_id=self.elem_id(name)
        )

    def _checkbox(self, name: str) -> Any:
        field = BY_NAME[name]
        return gr.Checkbox(field.default, label=field.label, elem_id=self.elem_id(name))

    def _gpus(self) -> Any:
        field, choices = BY_NAME["gpus"], gpu_choices()
        return gr.Dropdown(
            label=field.label,
            info=field.help,
            choices=choices,
            value=field.default,
            visible=len(choices) > 1,
            elem_id=self.elem_id("gpus"),
        )

    def run(self, p: Any, *arguments: Any) -> Any:
        """Run the job.

        On the page, errors appear where the host shows its messages.

        Args:
            p: The host's processing object.
            arguments: As `batch_arguments.read_arguments` takes them.

        Raises:
            OneDiffError: For a client of the API: the job cannot run, or has drawn nothing because
                no picture could be drawn.
        """
        processing.fix_seed(p)
        try:
            result = self._run(p, read_arguments(arguments))
            if result.has_failed and _is_for_api(p):
                raise PictureError("Nothing was drawn.", result.summary())
        except OneDiffError as exc:
            if _is_for_api(p):
                raise _with_status(exc) from exc
            processed = processing.Processed(p, [], p.seed, str(exc))
            processed.comments = str(exc)
            return processed
        summary = result.summary()
        infotexts = result.infotexts or [summary]
        processed = processing.Processed(p, result.shown, p.seed, infotexts[0], infotexts=infotexts)
        processed.comments = summary
        return processed

    def _run(self, p: Any, chosen: dict[str, Any]) -> BatchResult:
        if hides_folders(shared.cmd_opts):
            raise OptionError(
                "The WebUI was started with --hide-ui-dir-config.", "Folders are off with it."
            )
        job = BatchJob(
            inputs=[_folder(chosen["input"], "input")],
            output_dir=_folder(chosen["output"], "output"),
            size_rule=parse_size_rule(chosen["size"]),
            seed=int(p.seed),
            batch_size=chosen["batch"],
            name_template=NameTemplate(chosen["name"]),
            recursive=chosen["recursive"],
            captions=chosen["captions"],
            vary_seed=chosen["vary_seed"],
            keep_alpha=chosen["keep_alpha"],
        )
        count = chosen_gpu_count(chosen["gpus"])
        return run_batch_job(
            p,
            job,
            process=draw_seeded,
            state=shared.state,
            identity=_identity(p),
            shown_limit=_shown_limit(),
            further=partial(drawers_on_other_gpus, p, count - 1),
        )


def _is_for_api(p: Any) -> bool:
    """Whether a client of the host's API has sent the job, which shows no messages."""
    return bool(getattr(p, "is_api", False))


def _with_status(exc: OneDiffError) -> OneDiffError:
    """The error with the attributes from which the host's API makes its answer."""
    vars(exc).update(status_code=_UNUSABLE, detail=str(exc))
    return exc


def _folder(text: str, what: str) -> Path:
    folder = typed_path(text)
    if folder is None:
        raise OptionError(f"No {what} folder is given.", "Write the path of a folder.")
    return folder


def _shown_limit() -> int:
    limit = int(getattr(shared.opts, "img2img_batch_show_results_limit", 32))
    return 10_000 if limit < 0 else limit


def _identity(p: Any) -> dict[str, object]:
    """The settings that decide a picture besides the job's own."""
    opts = shared.opts
    names = (
        "sd_vae",
        "forge_additional_modules",
        "CLIP_stop_at_last_layers",
        "eta_noise_seed_delta",
        "randn_source",
    )
    return {
        "checkpoint": _checkpoint(),
        **{name: str(getattr(opts, name, "")) for name in names},
        **changes_of_job(p),
    }


def _checkpoint() -> str:
    """The chosen checkpoint's short hash, or its name when the host computes no hashes.

    Forge loads the chosen checkpoint only when it draws, so memory may hold another one, or none.
    """
    info = sd_models.select_checkpoint()
    return "" if info is None else str(info.calculate_shorthash() or info.name)
