"""Whether this machine runs on its battery, and whether its processors are idle."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from onediff_ext.core.priority import usable_cores

_SUPPLIES = Path("/sys/class/power_supply")
# More than the threads of a WebUI that waits.
_BUSY_SHARE = 0.25


def is_on_battery() -> bool:
    """Whether a battery is what powers this machine. Not known on macOS, where it is False."""
    if sys.platform == "win32":
        import psutil

        battery = psutil.sensors_battery()
        return battery is not None and battery.power_plugged is False
    return any(_text(supply / "status") == "Discharging" for supply in _batteries())


def are_processors_idle() -> bool:
    """Whether other programs leave the processors alone, by their load in the last minute.

    Windows has no such figure; there it is True.
    """
    if not hasattr(os, "getloadavg"):
        return True
    try:
        return os.getloadavg()[0] <= _BUSY_SHARE * usable_cores()
    except OSError:  # no figure in this container
        return True


def _batteries() -> list[Path]:
    try:
        # Those of mice and keyboards are of the scope "Device".
        return [
            supply
            for supply in _SUPPLIES.iterdir()
            if _text(supply / "type") == "Battery" and _text(supply / "scope") != "Device"
        ]
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
