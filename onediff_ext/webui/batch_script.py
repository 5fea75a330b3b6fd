"""The selectable script "OneDiff: img2img batch across resolutions"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr
from modules import processing, scripts, sd_models, shared

from onediff_ext.core.errors import OneDiffError, OptionError
from onediff_ext.pictures.naming import DEFAULT_TEMPLATE, NameTemplate
from onediff_ext.pictures.sizing import parse_size_rule
from onediff_ext.webui.always_visible import changes_of_job
from onediff_ext.webui.batch_job import BatchChoices, BatchJob
from onediff_ext.webui.host_access import hides_folders

TITLE = "OneDiff: img2img batch across resolutions"
SIZE_RULES = ["own", "scale:0.5", "longest:768", "longest:1024", "longest:1024:shrink"]
_SIZE_HELP = "own, scale:0.5, longest:768 or fixed:512x768; any of them may be typed in"


class BatchScript(scripts.Script):
    """Every picture of a folder at its own size, equal sizes together."""

    def title(self) -> str:
        return TITLE

    def show(self, is_img2img: bool) -> bool:
        # As the host's own batch tab: others may not name folders of this machine.
        return is_img2img and not hides_folders(shared.cmd_opts)

    def ui(self, is_img2img: bool) -> list[Any]:  # noqa: ARG002
        source = gr.Textbox(
            label="Input folder",
            info="Pictures of any sizes and formats; nothing has to be a multiple of 8.",
            elem_id=self.elem_id("input"),
        )
        target = gr.Textbox(
            label="Output folder",
            info="With a fixed seed, a run that was stopped goes on where it stopped.",
            elem_id=self.elem_id("output"),
        )
        with gr.Row():
            size = gr.Dropdown(
                label="Size of results",
                info=_SIZE_HELP,
                choices=SIZE_RULES,
                value=SIZE_RULES[0],
                allow_custom_value=True,
                elem_id=self.elem_id("size"),
            )
            batch = gr.Slider(
                1,
                16,
                value=4,
                step=1,
                label="Pictures of one size at once",
                elem_id=self.elem_id("batch"),
            )
        with gr.Row():
            recursive = gr.Checkbox(
                False, label="Subfolders too", elem_id=self.elem_id("recursive")
            )
            captions = gr.Checkbox(
                False,
                label="cat.txt beside cat.jpg is its prompt",
                elem_id=self.elem_id("captions"),
            )
        with gr.Row():
            vary_seed = gr.Checkbox(
                False, label="Another seed for each picture", elem_id=self.elem_id("vary_seed")
            )
            keep_alpha = gr.Checkbox(
                False, label="Keep transparency", elem_id=self.elem_id("keep_alpha")
            )
        name = gr.Textbox(
            DEFAULT_TEMPLATE,
            label="Names of results",
            info="{stem}, {index}, {seed}, {width}, {height}, {date}",
            elem_id=self.elem_id("name"),
        )
        return [source, target, size, batch, recursive, captions, vary_seed, keep_alpha, name]

    def run(
        self,
        p: Any,
        source: str = "",
        target: str = "",
        size: str = "own",
        batch: float = 4,
        recursive: bool = False,
        captions: bool = False,
        vary_seed: bool = False,
        keep_alpha: bool = False,
        name: str = DEFAULT_TEMPLATE,
    ) -> Any:
        """Do the job; what cannot be done is said in the host's own place for messages."""
        processing.fix_seed(p)
        try:
            if hides_folders(shared.cmd_opts):
                raise OptionError(
                    "The WebUI was started with --hide-ui-dir-config.", "Folders are off with it."
                )
            choices = BatchChoices(
                inputs=[_folder(source, "input")],
                output_dir=_folder(target, "output"),
                size_rule=parse_size_rule(size or "own"),
                batch_size=int(batch or 4),
                name_template=NameTemplate(name or DEFAULT_TEMPLATE),
                recursive=bool(recursive),
                captions=bool(captions),
                vary_seed=bool(vary_seed),
                keep_alpha=bool(keep_alpha),
            )
            job = BatchJob(
                p,
                choices,
                process=processing.process_images,
                state=shared.state,
                identity=_identity(p),
                shown_limit=_shown_limit(),
            )
            result = job.run()
        except OneDiffError as exc:
            processed = processing.Processed(p, [], p.seed, str(exc))
            processed.comments = str(exc)
            return processed
        summary = result.summary()
        infotexts = result.infotexts or [summary]
        processed = processing.Processed(p, result.shown, p.seed, infotexts[0], infotexts=infotexts)
        processed.comments = summary
        return processed


def _folder(text: str, what: str) -> Path:
    if not (text or "").strip():
        raise OptionError(f"No {what} folder is given.", "Write the path of a folder.")
    return Path(text.strip()).expanduser()


def _shown_limit() -> int:
    limit = int(getattr(shared.opts, "img2img_batch_show_results_limit", 32))
    return 10_000 if limit < 0 else limit


def _identity(p: Any) -> dict[str, object]:
    """What decides a picture besides the job's own numbers."""
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
    """The chosen checkpoint's short hash, or its name where the host makes no hashes.

    Not the one in memory: Forge loads what was chosen only when it draws, so until then that is
    another one, or none.
    """
    info = sd_models.select_checkpoint()
    return "" if info is None else str(info.calculate_shorthash() or info.name)
