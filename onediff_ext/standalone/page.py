"""The layout of the stand-alone page; its events are in `page_events`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradio as gr

from onediff_ext import __version__
from onediff_ext.core.step_cache_options import STEP_CACHES
from onediff_ext.hosts.diffusers.schedulers import sampler_names
from onediff_ext.panel import html
from onediff_ext.panel.gpu_choices import ONE, gpu_choices
from onediff_ext.panel.gradio_versions import accepted, every_seconds
from onediff_ext.panel.panel import Panel, build_panel
from onediff_ext.panel.size_source import SizeSource
from onediff_ext.panel.status_view import StatusView
from onediff_ext.pictures.size_rules import SUGGESTED_RULES
from onediff_ext.standalone.app import StandaloneApp
from onediff_ext.standalone.checkpoint_list import known_models
from onediff_ext.standalone.folder_on_gpus import off_reason
from onediff_ext.standalone.standalone_panel_host import StandalonePanelHost

_STATUS_SECONDS = 1.5
_SIZE_SOURCE = SizeSource("Current size", "onediff_width", "onediff_height", "onediff_batch")


@dataclass(frozen=True)
class PageDefaults:
    """The values that the page starts with.

    Args:
        model: The loaded checkpoint.
        output_dir: The folder of the images.
        input_dir: Folder of the batch tab.
        prompt, steps, guidance, sampler, side_px, size_rule: Suited to the checkpoint.
        examples: Prompts to try.
        is_local: Only this machine's own users reach the page. Otherwise users cannot name files
            or folders, nor import graphs.
    """

    model: Path
    output_dir: Path
    input_dir: str = ""
    prompt: str = ""
    steps: int = 20
    guidance: float = 7.0
    sampler: str = "Euler a"
    side_px: int = 512
    size_rule: str = "own"
    examples: tuple[str, ...] = ()
    is_local: bool = True


@dataclass
class Page:
    """The components of the page, by tab or purpose."""

    blocks: gr.Blocks
    panel: Panel
    model: dict[str, Any] = field(default_factory=dict)
    picture: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)
    image: dict[str, Any] = field(default_factory=dict)
    folder: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)


def build_page(standalone_app: StandaloneApp, defaults: PageDefaults) -> Page:
    """Build the page without its events."""
    port = StandalonePanelHost(standalone_app, defaults.output_dir, is_local=defaults.is_local)
    folder: dict[str, Any] = {}
    look = accepted(gr.Blocks, css=page_css(), theme=page_theme())
    with gr.Blocks(title="OneDiff", analytics_enabled=False, **look) as blocks:
        gr.HTML(f"<h1>OneDiff <small>{__version__}</small></h1>", elem_id="onediff_top")
        with gr.Row():
            with gr.Column(scale=5, min_width=400):
                model = _model(defaults)
                picture = _picture(defaults)
                with gr.Tabs(elem_id="onediff_tabs"):
                    with gr.Tab("Text to image"):
                        text = _text(defaults)
                    with gr.Tab("Image to image"):
                        image = _image(defaults)
                    if defaults.is_local:
                        with gr.Tab("Batch"):
                            folder = _folder(defaults)
            with gr.Column(scale=6, min_width=400):
                result = _result()
                with gr.Group(elem_id="onediff_panel"):
                    with gr.Row(elem_id="onediff_panel_head"):
                        enabled = gr.Checkbox(
                            port.off_reason() is None,
                            label="OneDiff",
                            container=False,
                            elem_id="onediff_enabled",
                        )
                        header = gr.HTML(
                            StatusView(port).header(enabled=False),
                            elem_id="onediff_header",
                            elem_classes=["onediff-header-status"],
                        )
                    panel = build_panel(
                        port, enabled, header, lambda name: f"onediff_{name}", (_SIZE_SOURCE,)
                    )
        every_seconds(
            _STATUS_SECONDS,
            panel.show_status,
            [panel.controls["enabled"]],
            panel.status_outputs,
        )
    return Page(blocks, panel, model, picture, text, image, folder, result)


def page_css() -> str:
    """Return the page's style sheet with the panel's."""
    return _CSS + html.style_sheet()


def page_theme() -> Any:
    """Return the page's Gradio theme, with system fonts: nothing is downloaded."""
    return gr.themes.Default(
        primary_hue="blue",
        neutral_hue="slate",
        spacing_size="sm",
        text_size="sm",
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    )


def _model(defaults: PageDefaults) -> dict[str, Any]:
    checkpoint = gr.Dropdown(
        label="Checkpoint",
        info=".safetensors file or diffusers folder; any path may be typed in."
        if defaults.is_local
        else "Those beside the checkpoint that the page was started with.",
        choices=[(Path(path).stem, path) for path in known_models(defaults.model)],
        value=str(defaults.model),
        allow_custom_value=defaults.is_local,
        elem_id="onediff_model",
    )
    with gr.Accordion("LoRA", open=False, visible=defaults.is_local):
        loras = gr.Textbox(
            label="LoRA files",
            info="FILE or FILE:WEIGHT, one a line.",
            lines=2,
            elem_id="onediff_loras",
        )
        load = gr.Button("Apply", size="sm", elem_id="onediff_load")
    return {"checkpoint": checkpoint, "load": load, "loras": loras}


def _picture(defaults: PageDefaults) -> dict[str, Any]:
    prompt = gr.Textbox(label="Prompt", value=defaults.prompt, lines=2, elem_id="onediff_prompt")
    if defaults.examples:
        gr.Examples([[text] for text in defaults.examples], [prompt], label="Try")
    negative = gr.Textbox(label="Negative prompt", lines=1, elem_id="onediff_negative")
    with gr.Row():
        sampler = gr.Dropdown(
            min_width=200,
            label="Sampler",
            choices=[*sampler_names(), "DPM++ 2M Karras"],
            value=defaults.sampler,
            elem_id="onediff_sampler",
        )
        steps = gr.Slider(
            1, 100, value=defaults.steps, step=1, label="Steps", elem_id="onediff_steps"
        )
        guidance = gr.Slider(
            0, 20, value=defaults.guidance, step=0.5, label="CFG", elem_id="onediff_guidance"
        )
    with gr.Row():
        seed = gr.Number(
            -1, label="Seed", info="-1: another each time", precision=0, elem_id="onediff_seed"
        )
        batch = gr.Slider(1, 16, value=1, step=1, label="Pictures at once", elem_id="onediff_batch")
        step_cache = gr.Dropdown(
            label="Step cache",
            info="Faster with transformers such as Flux.1; pictures differ.",
            choices=["off", *(f"{name}:{number:g}" for name, number in STEP_CACHES.items())],
            value="off",
            allow_custom_value=True,
            elem_id="onediff_step_cache",
        )
    return {
        "prompt": prompt,
        "negative": negative,
        "sampler": sampler,
        "steps": steps,
        "guidance": guidance,
        "seed": seed,
        "batch": batch,
        "step_cache": step_cache,
    }


def _text(defaults: PageDefaults) -> dict[str, Any]:
    sides = {}
    with gr.Row():
        for name in ("width", "height"):
            sides[name] = gr.Slider(
                64,
                2048,
                value=defaults.side_px,
                step=8,
                label=name.capitalize(),
                elem_id=f"onediff_{name}",
            )
    return {**sides, **_buttons("text", "Generate")}


def _image(defaults: PageDefaults) -> dict[str, Any]:
    # As a path: Gradio would decode any format that Pillow knows, EPS and its program included.
    source = gr.Image(
        label="Picture",
        type="filepath",
        image_mode=None,
        height=240,
        elem_id="onediff_source",
        sources=["upload", "clipboard"],
    )
    with gr.Row():
        strength = _strength("image")
        size = _size_rule(defaults, "image")
    return {"source": source, "strength": strength, "size": size, **_buttons("image", "Generate")}


def _folder(defaults: PageDefaults) -> dict[str, Any]:
    with gr.Row():
        source = gr.Textbox(
            defaults.input_dir,
            label="Input folder",
            info="Pictures of any sizes; equal sizes are drawn together.",
            elem_id="onediff_input_dir",
        )
        target = gr.Textbox(
            str(defaults.output_dir / "batch"),
            label="Output folder",
            info="With a fixed seed, a run that was stopped goes on where it stopped.",
            elem_id="onediff_output_dir",
        )
    with gr.Row():
        strength = _strength("folder")
        size = _size_rule(defaults, "folder")
    with gr.Row():
        recursive = gr.Checkbox(False, label="Subfolders too")
        captions = gr.Checkbox(False, label="cat.txt beside cat.jpg is its prompt")
        vary_seed = gr.Checkbox(False, label="Another seed for each")
        keep_alpha = gr.Checkbox(False, label="Keep transparency")
    gpus = _gpus()
    progress = gr.HTML(elem_id="onediff_folder_progress")
    return {
        "source": source,
        "target": target,
        "strength": strength,
        "size": size,
        "recursive": recursive,
        "captions": captions,
        "vary_seed": vary_seed,
        "keep_alpha": keep_alpha,
        "gpus": gpus,
        **_buttons("folder", "Run"),
        "progress": progress,
    }


def _gpus() -> Any:
    """The field is shown on a machine with several GPUs only; without Ray it cannot be used."""
    choices, off = gpu_choices(), off_reason()
    return gr.Dropdown(
        label="GPUs",
        info=off or "Each of them loads the model, the page's own GPU a second time.",
        choices=choices,
        value=ONE,
        visible=len(choices) > 1,
        interactive=not off,
        elem_id="onediff_gpus",
    )


def _strength(tab: str) -> Any:
    return gr.Slider(
        0.05,
        1,
        value=0.6,
        step=0.05,
        label="Denoising strength",
        elem_id=f"onediff_{tab}_strength",
    )


def _size_rule(defaults: PageDefaults, tab: str) -> Any:
    return gr.Dropdown(
        label="Size of results",
        choices=list(dict.fromkeys([defaults.size_rule, *SUGGESTED_RULES])),
        value=defaults.size_rule,
        allow_custom_value=True,
        elem_id=f"onediff_{tab}_size",
    )


def _buttons(tab: str, go: str) -> dict[str, Any]:
    with gr.Row():
        start = gr.Button(go, variant="primary", scale=3, elem_id=f"onediff_{tab}_go")
        stop = gr.Button("Interrupt", scale=1, elem_id=f"onediff_{tab}_interrupt")
    return {"go": start, "interrupt": stop}


def _result() -> dict[str, Any]:
    gallery = gr.Gallery(
        label="Pictures",
        elem_id="onediff_gallery",
        height=460,
        columns=3,
        object_fit="contain",
        interactive=False,
        **accepted(gr.Gallery, preview=True),
    )
    said = gr.HTML(elem_id="onediff_said")
    with gr.Accordion("Infotext", open=False):
        info = gr.Textbox(show_label=False, container=False, lines=3, elem_id="onediff_infotext")
    return {"gallery": gallery, "said": said, "info": info}


_CSS = """
.gradio-container { max-width: 1500px !important; margin: 0 auto; }
#onediff_top h1 { margin: .2em 0; font-size: 1.5rem; }
#onediff_top small { font-size: .6em; font-weight: 400; opacity: .6; }
#onediff_panel_head { align-items: center; padding: .6em .8em; flex-wrap: nowrap; }
#onediff_panel_head > * { min-width: 0; }
#onediff_panel_head > :first-child { flex: none; width: auto; }
#onediff_panel_head #onediff_enabled label { font-weight: 600; font-size: 1.05rem; }
#onediff_panel, #onediff_panel .styler { background: var(--block-background-fill); }
#onediff_panel .html-container { padding: 0 .8em; }
#onediff_panel button:not(.label-wrap) { min-height: 2.2em; }
#onediff_panel .onediff-buttons { padding: .4em .8em; }
#onediff_header { text-align: right; }
.onediff-workers { width: 100%; font-size: .9em; }
.onediff-workers, .onediff-workers tr, .onediff-workers th, .onediff-workers td
{ border: 0 !important; text-align: left; padding: .15em .5em .15em 0; }
#onediff_gallery .thumbnail-lg, #onediff_gallery .thumbnail-lg img { max-height: 420px; }
#onediff_gallery .thumbnail-lg img { object-fit: contain; }
"""
