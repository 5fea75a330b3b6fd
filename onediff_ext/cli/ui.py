"""``onediff-ext ui``: the panel in the browser, without a WebUI."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from onediff_ext.cli import model_arguments


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "ui",
        help="open the panel in the browser, without a WebUI",
        description="Text to image, image to image and batches, on the demo model unless -m says"
        " otherwise.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on")
    parser.add_argument("--port", type=int, help="port (default: the first free one from 7860)")
    parser.add_argument("--no-browser", action="store_true", help="do not open the browser")
    parser.add_argument("-o", "--output", type=Path, default=Path("onediff-output"))
    model_arguments.add_model_arguments(parser)
    parser.set_defaults(run=run, when_stopped="The page is closed.")


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from onediff_ext.core.errors import OptionError

    if importlib.util.find_spec("gradio") is None:
        raise OptionError(
            "The page needs the package gradio.",
            "Run `pip install 'onediff-ext[ui]'`, or `python install.py ui`.",
        )
    from onediff_ext.ui.standalone.app import serve

    model_arguments.import_libraries()
    print("Loading the page.", flush=True)
    device = model_arguments.find_device(arguments.device)
    serve(
        arguments.model,
        device=device,
        dtype=model_arguments.find_dtype(arguments.dtype, device),
        options=model_arguments.parse_options(arguments),
        loras=model_arguments.parse_loras(arguments.lora),
        output_dir=arguments.output,
        host=arguments.host,
        port=arguments.port,
        open_browser=not arguments.no_browser,
        vae_tiling=arguments.vae_tiling,
    )
    return 0
