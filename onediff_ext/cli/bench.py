"""``onediff-ext bench``: single UNet steps, eager and compiled."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.cli import report_file
from onediff_ext.cli.argument_types import positive_count, required_sizes
from onediff_ext.cli.model_arguments import add_model_arguments
from onediff_ext.cli.model_identity import model_identity
from onediff_ext.cli.model_loading import load_model
from onediff_ext.cli.progress import BuildProgressBars
from onediff_ext.cli.tables import format_table

if TYPE_CHECKING:
    from onediff_ext.hosts.diffusers.jobs.step_bench import StepTiming


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "bench", help="measure steps of the UNet or transformer, eager beside compiled"
    )
    parser.add_argument(
        "--sizes",
        default="512x512, 768x512, 720x960",
        help='sizes to measure (default: "%(default)s")',
    )
    parser.add_argument(
        "--rounds",
        type=positive_count,
        default=10,
        help="measured steps of each size, eager and compiled (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    add_model_arguments(parser)
    parser.set_defaults(run=run, build="wait")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    shapes = required_sizes(arguments.sizes)
    report_file.check_report_path(arguments.json)
    identity = model_identity(arguments)
    model = load_model(arguments, identity, BuildProgressBars())

    from onediff_ext.hosts.diffusers.jobs.run_report import describe_device, left_eager, versions
    from onediff_ext.hosts.diffusers.jobs.step_bench import time_steps

    timings = [time_steps(model.image_generator.pipe, shape, arguments.rounds) for shape in shapes]
    print(describe_device(model.image_generator.device))
    print(timing_table(timings))
    assert model.session is not None
    report_file.print_fallbacks(left_eager(model.session))
    if arguments.json is not None:
        figures = {
            "device": describe_device(model.image_generator.device),
            "versions": versions(),
            "model": model.image_generator.checkpoint.name,
            "ready_seconds": model.ready_seconds,
            "rows": [{**asdict(t), "speedup": t.speedup} for t in timings],
        }
        report_file.write_json(arguments.json, figures)
    return 0


def timing_table(timings: list[StepTiming]) -> str:
    """Return a table of sizes and times."""
    return format_table(
        ["size", "at once", "first s", "eager ms", "compiled ms", "speed-up", "error"],
        [
            [
                f"{t.shape.width_px}x{t.shape.height_px}",
                t.shape.batch,
                f"{t.first_s:.2f}",
                f"{t.eager_ms:.1f}",
                f"{t.compiled_ms:.1f}",
                f"{t.speedup:.2f}x",
                f"{t.error:.0e}",
            ]
            for t in timings
        ],
    )
