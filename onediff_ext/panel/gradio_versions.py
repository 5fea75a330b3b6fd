"""Differences between Gradio 3.41, 4.40 and 6 that the panel meets."""

from __future__ import annotations

import inspect
from typing import Any

import gradio


def accepted(function: Any, **arguments: Any) -> dict[str, Any]:
    """The arguments that this Gradio's function or class accepts."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}


def chips(**arguments: Any) -> Any:
    """An empty list of removable texts.

    Args:
        arguments: Label, info and element id.
    """
    arguments |= {"choices": [], "value": [], "multiselect": True}
    try:  # newer ones refuse a chip that was not a choice when the page was made
        return gradio.Dropdown(allow_custom_value=True, **arguments)
    except ValueError:  # Gradio 3.41 refuses this instead, and takes any chip
        return gradio.Dropdown(**arguments)


def on_user_input(component: Any, *arguments: Any, **more: Any) -> None:
    """Call a function when the user changes a component, and not when another function does."""
    event = getattr(component, "input", None) or component.change
    event(*arguments, **more)


def script_argument(event: Any, script: str) -> dict[str, Any]:
    """The argument by which this Gradio's events take JavaScript that runs before the function.

    Args:
        event: The event's method, such as ``button.click``.
        script: A function of the inputs that returns the inputs.
    """
    return {"js": script} if "js" in inspect.signature(event).parameters else {"_js": script}


def on_expand(accordion: Any, function: Any, **arguments: Any) -> None:
    """Call a function when the user opens an accordion; needs Gradio 6.

    In older ones javascript/onediff.js presses a button for it.
    """
    if hasattr(accordion, "expand"):
        accordion.expand(function, **arguments)


def every_seconds(seconds: float, function: Any, inputs: list[Any], outputs: list[Any]) -> None:
    """Call a function periodically while the page is open; needs Gradio 4.40."""
    timer = gradio.Timer(seconds)
    timer.tick(function, inputs=inputs, outputs=outputs, queue=False, show_progress="hidden")
