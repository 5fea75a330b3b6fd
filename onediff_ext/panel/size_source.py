"""Where the page shows the size of the next picture: the sliders of one tab."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class SizeSource:
    """One tab's controls of size. They are read in the browser, where each host has them.

    Args:
        label: Of the button that takes its size, such as ``"Size of txt2img"``.
        width_id, height_id, batch_id: Element ids of the controls.
    """

    label: str
    width_id: str
    height_id: str
    batch_id: str

    def reading_script(self, inputs: int) -> str:
        """Return JavaScript that puts the size into the last input of an event.

        The text is ``"WIDTHxHEIGHT@BATCH"``; boxes that are not there leave it empty.

        Args:
            inputs: Number of the event's inputs. Gradio 3 and 4 pass the outputs after them.
        """
        ids = json.dumps([self.width_id, self.height_id, self.batch_id])
        return (
            "(...values) => {"
            f" const boxes = {ids}.map("
            "id => document.querySelector(`#${id} input[type=number]`));"
            " const size = boxes.every(Boolean)"
            " ? `${boxes[0].value}x${boxes[1].value}@${boxes[2].value}` : '';"
            f" return [...values.slice(0, {inputs - 1}), size]; }}"
        )


def tab_sources(first: str, *others: str) -> tuple[SizeSource, ...]:
    """The tabs of a WebUI, the panel's own one first."""
    return tuple(
        SizeSource(f"Size of {tab}", f"{tab}_width", f"{tab}_height", f"{tab}_batch_size")
        for tab in (first, *others)
    )
