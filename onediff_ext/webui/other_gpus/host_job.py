"""The host's processing object in another process: what travels, and how it is made again."""

from __future__ import annotations

import pickle
from typing import Any

from onediff_ext.core.errors import OptionError
from onediff_ext.core.words import first_line
from onediff_ext.webui.other_gpus.messages import Draw, Layout

# Each process has its own; the host makes them when it draws.
_MADE_BY_THE_HOST = frozenset(
    {
        "c", "uc", "hr_c", "hr_uc", "cached_c", "cached_uc", "cached_hr_c", "cached_hr_uc",
        "rng", "sampler", "scripts", "scripts_value", "scripts_setup_complete", "script_args",
        "script_args_value", "sd_model", "modified_noise",
    }
)  # fmt: skip


def check_sendable(p: Any) -> None:
    """Check that a job can be drawn by another process.

    Args:
        p: The host's img2img processing object.

    Raises:
        OptionError: A part of it cannot be sent there.
    """
    for name, value in _attributes(p).items():
        _check(f"its {name}", value)
    for number, value in enumerate(p.script_args):
        _check(f"argument {number} of its scripts", value)


def draw_message(p: Any, checkpoint: str) -> Draw:
    """Return what another process needs to draw a job.

    Args:
        p: The host's img2img processing object, ready to be drawn; `check_sendable` has passed.
        checkpoint: The title of the host's checkpoint, or "".
    """
    return Draw(_attributes(p), tuple(p.script_args), checkpoint)


def _attributes(p: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(p).items() if name not in _MADE_BY_THE_HOST}


def script_layout(runner: Any) -> Layout:
    """Return which arguments belong to which script.

    Args:
        runner: The host's ``scripts_img2img``, after it has made the scripts' controls.
    """
    return tuple(
        (str(script.title()), int(script.args_from or 0), int(script.args_to or 0))
        for script in runner.scripts
    )


def made_again(message: Draw, processing_class: Any, runner: Any) -> Any:
    """Return the processing object of a message.

    Args:
        message: From `draw_message`.
        processing_class: The host's `StableDiffusionProcessingImg2Img`.
        runner: The host's ``scripts_img2img``.
    """
    p = processing_class()
    p.is_api = message.attributes.get("is_api", False)  # not all scripts are set up then
    # The host sets scripts up here, and some set seeds and samplers from their arguments.
    p.scripts = runner
    p.script_args = message.script_args
    for name, value in message.attributes.items():
        setattr(p, name, value)
    if message.checkpoint:  # the command line of this process may name another one
        p.override_settings = {"sd_model_checkpoint": message.checkpoint, **p.override_settings}
    return p


def _check(what: str, value: object) -> None:
    reason = _reason(value)
    if reason is not None:
        raise OptionError(
            f"Other GPUs cannot draw this job: {what} cannot be sent to them ({reason}).",
            "Choose 1 GPU, or switch off the script or extension that it belongs to.",
        )


def _reason(value: object) -> str | None:
    """Return why a value cannot be sent; None when it can."""
    try:
        pickle.dumps(value)
    except Exception as exc:  # any class may raise anything
        return first_line(str(exc), type(exc).__name__)
    return None
