"""``onediff-ext ui``: the stand-alone page in the browser, without a WebUI."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from onediff_ext.cli import library_imports
from onediff_ext.cli.argument_types import named_path
from onediff_ext.cli.device_options import find_device
from onediff_ext.cli.model_arguments import add_model_arguments, parse_options
from onediff_ext.core.words import printable


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "ui",
        help="open the panel in the browser, without a WebUI",
        description="Text to image, image to image and batches, on the demo model unless -m says"
        " otherwise. Backend, precision and components are chosen in the panel.",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to serve on; one that others reach needs --auth (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, help="port (default: the first free one from 7860)")
    parser.add_argument(
        "--auth",
        action="append",
        default=[],
        metavar="USER:PASSWORD",
        help="who may use the page; other users of this machine can see it in the process list",
    )
    parser.add_argument(
        "--auth-file", type=Path, metavar="FILE", help="the same from a file, one a line"
    )
    parser.add_argument(
        "--no-auth", action="store_true", help="serve the page to everybody who reaches the address"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that others reach this page by, such as a proxy's",
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open the browser")
    parser.add_argument(
        "-o",
        "--output",
        type=named_path,
        default=Path("onediff-output"),
        help="folder of the pictures (default: %(default)s)",
    )
    add_model_arguments(parser)
    parser.set_defaults(run=run, when_stopped="The page is closed.")


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from onediff_ext.core.errors import OptionError

    if importlib.util.find_spec("gradio") is None:
        raise OptionError(
            "The page needs the package gradio.",
            "Run `pip install 'onediff-ext[ui]'`, or `python install.py ui`.",
        )
    from onediff_ext.standalone.serving import parse_serving

    serving = parse_serving(
        host=arguments.host,
        port=arguments.port,
        open_browser=not arguments.no_browser,
        auth=arguments.auth,
        auth_file=arguments.auth_file,
        no_auth=arguments.no_auth,
        allowed_hosts=arguments.allow_host,
    )
    if not serving.is_local and not serving.auth:
        warning = f"everybody who reaches {serving.host} can use this page, without a password."
        print(printable(f"warning: {warning}"), file=sys.stderr)
    from onediff_ext.hosts.diffusers.lora.lora_option import parse_lora
    from onediff_ext.standalone.launch import serve

    library_imports.import_libraries()
    print("Loading the page.", flush=True)
    serve(
        arguments.model,
        device=find_device(arguments.device),
        dtype_name=arguments.dtype,
        options=parse_options(arguments),
        loras=[parse_lora(text) for text in arguments.lora],
        output_dir=arguments.output,
        serving=serving,
        vae_tiling=arguments.vae_tiling,
    )
    return 0
