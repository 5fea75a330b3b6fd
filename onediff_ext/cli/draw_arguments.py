"""Arguments that decide an image: prompt, sampler, steps, seed, DeepCache."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from onediff_ext.core.deepcache_options import COST, LEVELS, DeepCacheOptions
from onediff_ext.core.errors import OptionError

if TYPE_CHECKING:
    from onediff_ext.hosts.diffusers.drawing.image_generator import DrawSettings


_MAX_SEED = 2**53 - 1


def add_draw_arguments(parser: argparse.ArgumentParser, *, with_strength: bool) -> None:
    """Add prompt, sampler, seed and DeepCache, and for img2img the strength."""
    group = parser.add_argument_group("picture")
    group.add_argument("-p", "--prompt", default="")
    group.add_argument("-n", "--negative-prompt", default="")
    group.add_argument("--steps", type=int, default=20)
    group.add_argument("--guidance", type=float, default=7.0, help="CFG scale (default: 7)")
    group.add_argument(
        "--scheduler", default="Euler a", help='sampler, such as "DPM++ 2M Karras" or LCM'
    )
    group.add_argument("--seed", type=_seed, default=0)
    levels = ", ".join(f"{name} ({interval})" for name, interval in LEVELS.items())
    group.add_argument(
        "--deepcache",
        type=_deepcache,
        default="off",
        metavar="N",
        help=f"run the whole UNet at every N-th step only: faster, but {COST}. A number or"
        f' {levels}; "3 depth=1" keeps more (default: off)',
    )
    if with_strength:
        group.add_argument("--strength", type=float, default=0.6, help="denoising strength")


def _seed(text: str) -> int:
    """Read a seed that infotext and JSON keep exactly, for argparse."""
    if not text.isdecimal() or int(text) > _MAX_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {_MAX_SEED}")
    return int(text)


def _deepcache(text: str) -> DeepCacheOptions:
    """Read a DeepCache setting, for argparse."""
    try:
        return DeepCacheOptions.parse(text)
    except OptionError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def draw_settings(arguments: argparse.Namespace) -> DrawSettings:
    """Return the settings of the command line.

    Raises:
        OptionError: A value cannot be used.
    """
    from onediff_ext.hosts.diffusers.drawing.image_generator import DrawSettings

    given = {
        "prompt": arguments.prompt,
        "negative_prompt": arguments.negative_prompt,
        "steps": arguments.steps,
        "guidance": arguments.guidance,
        "scheduler": arguments.scheduler,
        "deepcache": arguments.deepcache,
    }
    if hasattr(arguments, "strength"):
        given["strength"] = arguments.strength
    return DrawSettings(**given)
