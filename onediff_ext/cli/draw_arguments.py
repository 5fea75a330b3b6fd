"""Arguments that decide an image: prompt, sampler, steps, seed, DeepCache, guidance steps."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onediff_ext.core.deepcache_options import COST, LEVELS, DeepCacheOptions
from onediff_ext.core.errors import OptionError
from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.core.step_cache_options import StepCacheOptions
from onediff_ext.hosts.diffusers.transformer_models import transformer_model_of

if TYPE_CHECKING:
    from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings


DEFAULTS = {
    "steps": "20; transformers: the model's own",
    "guidance": "7; transformers: the model's own",
    "scheduler": "Euler a; transformers: Euler",
}
"""What the help says of arguments whose defaults depend on the model."""

_MAX_SEED = 2**53 - 1


def add_draw_arguments(
    parser: argparse.ArgumentParser, *, with_strength: bool, defaults: Mapping[str, str] = DEFAULTS
) -> None:
    """Add prompt, sampler, seed and DeepCache, and for img2img the strength.

    Args:
        parser: Of the command.
        with_strength: Whether the command starts from pictures.
        defaults: What the help says of steps, guidance and sampler, which depend on the model.
    """
    group = parser.add_argument_group("picture")
    group.add_argument("-p", "--prompt", default="", help="what the picture shows")
    group.add_argument("-n", "--negative-prompt", default="", help="what it does not show")
    group.add_argument("--steps", type=int, help=f"sampling steps (default: {defaults['steps']})")
    group.add_argument(
        "--guidance", type=float, help=f"CFG scale (default: {defaults['guidance']})"
    )
    group.add_argument(
        "--scheduler",
        help=f'such as "DPM++ 2M Karras" or LCM (default: {defaults["scheduler"]})',
    )
    group.add_argument(
        "--seed", type=_seed, default=0, help="the same seed draws the same picture (default: 0)"
    )
    levels = ", ".join(f"{name} ({interval})" for name, interval in LEVELS.items())
    group.add_argument(
        "--deepcache",
        type=_deepcache,
        default="off",
        metavar="N",
        help=f"run the whole UNet at every N-th step only: faster, but {COST}. A number or"
        f' {levels}; "3 depth=1" keeps more (default: off)',
    )
    group.add_argument(
        "--step-cache",
        type=_step_cache,
        default="off",
        metavar="NAME[:N]",
        help="the same for transformers, by diffusers: first-block:0.08, mag-cache:0.06 or"
        " taylorseer-lite:5 (default: off)",
    )
    add_guidance_steps(
        group,
        "compute CFG in a part of the steps only: the others take half of the work, and"
        " pictures differ. interval:0-0.6 for the first 60 %% of the steps, adaptive:0.991 until"
        " prompt and negative prompt predict alike, gate:0.4 for 40 %% with cross-attention frozen"
        " afterwards (default: off, which is all steps)",
    )
    if with_strength:
        group.add_argument(
            "--strength",
            type=float,
            default=0.6,
            help="denoising strength, above 0 and up to 1 (default: %(default)s)",
        )


def add_guidance_steps(group: Any, text: str) -> None:
    """Add ``--guidance-steps``.

    Args:
        group: A parser, or a group of its options.
        text: The help.
    """
    group.add_argument(
        "--guidance-steps", type=_guidance_steps, default="off", metavar="STEPS", help=text
    )


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


def _step_cache(text: str) -> StepCacheOptions:
    """Read a step cache, for argparse."""
    try:
        return StepCacheOptions.parse(text)
    except OptionError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _guidance_steps(text: str) -> GuidanceOptions:
    """Read guidance steps, for argparse."""
    try:
        return GuidanceOptions.parse(text)
    except OptionError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def draw_settings(arguments: argparse.Namespace) -> DrawSettings:
    """Return the settings of the command line.

    Raises:
        OptionError: A value cannot be used.
    """
    from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings

    given = {
        "prompt": arguments.prompt,
        "negative_prompt": arguments.negative_prompt,
        **_start_values(arguments),
        "deepcache": arguments.deepcache,
        "step_cache": arguments.step_cache,
        "guidance_steps": arguments.guidance_steps,
    }
    if hasattr(arguments, "strength"):
        given["strength"] = arguments.strength
    return DrawSettings(**given)


def _start_values(arguments: argparse.Namespace) -> dict[str, object]:
    """Return steps, guidance and sampler: as given, else those that suit the model."""
    model = transformer_model_of(arguments.config or arguments.model)
    suited: dict[str, object] = {}
    if model is not None:
        suited = {"steps": model.steps, "guidance": model.guidance, "scheduler": "Euler"}
    named = ((name, getattr(arguments, name)) for name in ("steps", "guidance", "scheduler"))
    return {**suited, **{name: value for name, value in named if value is not None}}
