"""Which of the buttons that start and end builds apply now.

*Build now* starts a warm-up, and ends a pause too. It keeps its place, so that a second click on it
presses no other button. *Pause* makes all builds wait until *Go on*. *Cancel* ends the warm-up, and
a pause with it: the next picture has its missing graphs built, as every picture has.
"""

from __future__ import annotations

from dataclasses import dataclass

from onediff_ext.core.status import Status


@dataclass(frozen=True)
class BuildButtons:
    """Whether each button does something now.

    Args:
        build_now: Grey where it does nothing.
        pause, go_on, cancel: Hidden where they do nothing.
    """

    build_now: bool
    pause: bool
    go_on: bool
    cancel: bool


def build_buttons(status: Status) -> BuildButtons:
    """Return which buttons do something now."""
    return BuildButtons(
        build_now=not status.warming_up,
        pause=status.building and not status.paused,
        go_on=status.paused,
        cancel=status.warming_up,
    )
