"""Where Gradio 3.41, 4.40 and 6 differ, as far as the panel meets it."""

from __future__ import annotations

import inspect
from typing import Any

import gradio


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
