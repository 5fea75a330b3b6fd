"""``onediff-ext warmup SIZES``: build or load everything, then one measured step of each size."""

from __future__ import annotations

import argparse
from typing import Any

from onediff_ext.cli import model_arguments
from onediff_ext.cli.bench import timing_table
from onediff_ext.cli.progress import BuildListener
from onediff_ext.cli.report_file import print_fallbacks


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("warmup", help="build graphs now and measure a step of each size")
    parser.add_argument("sizes", nargs="+", help='such as 512x768 or "512x768, 1024x1024@2"')
    model_arguments.add_model_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Warm up; 1 when a kind has to run eager."""
    from onediff_ext.core.errors import OptionError

    if arguments.eager:
        raise OptionError("There is nothing to warm up without graphs.", "Leave --eager out.")
    shapes = model_arguments.given_sizes(" ".join(arguments.sizes))
    identity = model_arguments.model_identity(arguments)
    model = model_arguments.load_model(arguments, identity, BuildListener())
    session = model.session
    assert session is not None

    from onediff_ext.hosts.diffusers.report import left_eager
    from onediff_ext.hosts.diffusers.step_bench import time_steps

    timings = [time_steps(model.painter.pipe, shape, rounds=1) for shape in shapes]
    print(timing_table(timings))
    print(
        f"{session.count('built')} graphs built, {session.count('loaded')} loaded"
        f" in {model.ready_seconds:.1f} s"
    )
    eager = left_eager(session)
    print_fallbacks(eager)
    return 1 if eager else 0
