"""The headline: which one of five things is true of a session, decided from its status alone."""

from __future__ import annotations

from enum import Enum

from onediff_ext.core.status import COMPILED_IN_PART, Status

COMPILED = "compiled"


class Headline(str, Enum):
    """The five things that the panel's header can say; the value names its colour in the CSS."""

    OFF = "off"
    WITHOUT = "without"
    BUILDING = "building"
    GRAPHS = "graphs"
    PART = "part"


def headline(status: Status, wanted: bool) -> Headline:
    """Return the headline of a status.

    `GRAPHS` needs proof: every block of the last picture ran its graph. A picture whose blocks
    were not counted counts as drawn without graphs.

    Args:
        status: The status.
        wanted: Whether OneDiff is ticked. Builds go on after the tick is gone, and show.
    """
    measuring = status.stage in ("captures", "measuring")
    if measuring or ((status.building or status.warming_up) and not status.paused):
        return Headline.BUILDING
    if not wanted:
        return Headline.OFF
    if status.running not in (COMPILED, COMPILED_IN_PART) or status.blocks_compiled <= 0:
        return Headline.WITHOUT
    is_whole = status.blocks_compiled == status.blocks_needed and not status.eager_blocks
    return Headline.GRAPHS if is_whole and status.running == COMPILED else Headline.PART
