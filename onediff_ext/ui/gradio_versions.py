"""Where Gradio 3.41, 4.40 and 6 differ, as far as the panel meets it."""

from __future__ import annotations

import inspect
from typing import Any

import gradio

MIN_VERSION, BELOW_VERSION = (3, 41), (7,)
"""The versions that the panel is tested with: A1111's 3.41, Forge's 4.40, 5 and 6."""


def version() -> tuple[int, ...]:
    """Gradio's own, such as (6, 31)."""
    return tuple(int(part) for part in gradio.__version__.split(".")[:2])


def accepted(function: Any, **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that this Gradio's function or class knows."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}


def on_user_input(component: Any, *arguments: Any, **more: Any) -> None:
    """Call a function when the user, not another function, has changed a component."""
    event = getattr(component, "input", None) or component.change
    event(*arguments, **more)


def every_seconds(seconds: float, function: Any, inputs: list[Any], outputs: list[Any]) -> None:
    """Call a function again and again while the page is open; needs Gradio 4.40."""
    timer = gradio.Timer(seconds)
    timer.tick(function, inputs=inputs, outputs=outputs, queue=False, show_progress="hidden")
