"""DeepCache options. Panel, API, X/Y/Z script and command line all parse into this class.

DeepCache runs the deep part of the UNet on some steps only and reuses its features on the
others: Ma, Fang, Wang, "DeepCache: Accelerating Diffusion Models for Free", CVPR 2024,
arXiv:2312.00858.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from onediff_ext.core.errors import OptionError
from onediff_ext.core.json_schema import check_names
from onediff_ext.core.words import number_text

LEVELS: Mapping[str, int] = {"off": 1, "light": 2, "medium": 3, "strong": 5}
"""Names that users see → interval."""

SCHEDULES = ("uniform", "nonuniform")

COST = (
    "pictures differ from those without it: hardly with light, in small details with medium,"
    " visibly with strong"
)
"""How much fidelity each level costs, for help texts and tooltips."""

MIN_STEPS = 10
"""With fewer steps, neighbouring steps differ too much to share features."""

_FEW_STEP_SAMPLERS = ("lcm", "tcd", "turbo", "lightning")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class DeepCacheOptions:
    """How much of the UNet's work is reused.

    Args:
        interval: UNet calls from one full call to the next; 1 is off.
        depth: Encoder layers that a shallow call runs. 0 runs only the last layer of the
            decoder; more costs time and changes the picture less. The reference implementation
            calls this number ``cache_branch_id``.
        start, end: Features are reused between these shares of a picture's steps, 0 to 1.
        schedule: ``"uniform"``, or ``"nonuniform"``: full calls are closer together
            around `centre`.
        centre: Share of the steps where features change most; for "nonuniform".
        power: How much closer, 1 to 4; for "nonuniform".

    Raises:
        OptionError: A value cannot be used.
    """

    interval: int = LEVELS["medium"]
    depth: int = 0
    start: float = 0.0
    end: float = 1.0
    schedule: str = "uniform"
    centre: float = 0.3
    power: float = 1.4

    def __post_init__(self) -> None:
        if not _is_whole(self.interval) or not 1 <= self.interval <= 50:
            raise OptionError(
                f"A DeepCache interval of {self.interval!r} cannot be used.",
                f"Choose 1 (off) to 50, or {', '.join(LEVELS)}.",
            )
        if not _is_whole(self.depth) or self.depth < 0:
            raise OptionError(
                f"A DeepCache depth of {self.depth!r} cannot be used.", "Choose 0 or more."
            )
        for name in ("start", "end", "centre", "power"):
            if not isinstance(getattr(self, name), (int, float)):
                raise OptionError(
                    f"A DeepCache {name} of {getattr(self, name)!r} cannot be used.",
                    "Use a number.",
                )
        if not 0 <= self.start <= self.end <= 1:
            raise OptionError(
                f"DeepCache cannot work from {self.start} to {self.end} of the steps.",
                "Choose two numbers from 0 to 1, the smaller first.",
            )
        if self.schedule not in SCHEDULES:
            raise OptionError(
                f"Unknown DeepCache schedule {self.schedule!r}.", f"Known: {', '.join(SCHEDULES)}."
            )
        if not 0 <= self.centre <= 1:
            raise OptionError(f"A centre of {self.centre} cannot be used.", "Choose 0 to 1.")
        if not 1 <= self.power <= 4:
            raise OptionError(f"A power of {self.power} cannot be used.", "Choose 1 to 4.")

    @property
    def is_on(self) -> bool:
        """Whether these options reuse anything."""
        return self.interval > 1 and self.start < self.end

    def __str__(self) -> str:
        """Return text that `parse` reads back, such as ``"3"`` or ``"3 depth=1 end=0.8"``."""
        default = DeepCacheOptions()
        return " ".join(
            [
                str(self.interval),
                *(
                    f"{f.name}={_number_text(getattr(self, f.name))}"
                    for f in fields(self)[1:]
                    if getattr(self, f.name) != getattr(default, f.name)
                ),
            ]
        )

    @property
    def label(self) -> str:
        """The name for menus and infotext: a level's name if it is one, else the text."""
        names = {str(DeepCacheOptions(interval)): name for name, interval in LEVELS.items()}
        return names.get(str(self), str(self))

    @classmethod
    def parse(cls, value: object) -> DeepCacheOptions:
        """Read options in any form that a front end passes.

        Args:
            value: This class; None, False or "" for off; True for the default; an interval; a
                level; a text such as ``"3 depth=1"``; a mapping of the fields.

        Raises:
            OptionError: It cannot be read or used.
        """
        if isinstance(value, cls):
            return value
        if value is None or value is False:
            return OFF
        if value is True:
            return cls()
        if isinstance(value, Mapping):
            return _from_mapping(value)
        if isinstance(value, (int, float)):
            if value == 0:
                return OFF
            if abs(value) >= 2**53:  # floats of this size are inexact
                raise OptionError("That is too large for a DeepCache interval.", _HINT)
            is_whole = math.isfinite(value) and value == int(value)
            return cls(interval=int(value) if is_whole else value)  # type: ignore[arg-type]
        if isinstance(value, str):
            return _from_text(value)
        raise OptionError(f"{value!r} is no DeepCache setting.", _HINT)


JSON_FORMS: tuple[Mapping[str, Any], ...] = (
    {"type": "number"},
    {"type": "boolean"},
    {
        "type": "object",
        "properties": {
            "interval": {"type": "integer"},
            "depth": {"type": "integer"},
            "start": {"type": "number"},
            "end": {"type": "number"},
            "schedule": {"type": "string", "enum": list(SCHEDULES)},
            "centre": {"type": "number"},
            "power": {"type": "number"},
        },
        "additionalProperties": False,
    },
)
"""JSON Schemas of what `DeepCacheOptions.parse` accepts besides texts."""

_HINT = f'Use {", ".join(LEVELS)}, an interval such as 3, or a text such as "3 depth=1".'
OFF = DeepCacheOptions(interval=1)


def few_steps_reason(sampler: str, steps: int | None) -> str | None:
    """Return why DeepCache saves nothing with these settings, or None when it does.

    Args:
        sampler: Name of a sampler, scheduler class or checkpoint.
        steps: Steps of the whole schedule; image to image runs fewer. None if unknown.
    """
    if any(name in sampler.lower() for name in _FEW_STEP_SAMPLERS):
        return f"DeepCache gains nothing with {sampler}: its few steps differ too much"
    if steps is not None and steps < MIN_STEPS:
        return f"DeepCache needs {MIN_STEPS} steps or more; {steps} differ too much"
    return None


def _from_mapping(given: Mapping[str, Any]) -> DeepCacheOptions:
    check_names(given, [f.name for f in fields(DeepCacheOptions)], "DeepCache option")
    return replace(DeepCacheOptions(), **dict(given))


def _from_text(text: str) -> DeepCacheOptions:
    first, *rest = text.replace(",", " ").lower().split() or ["off"]
    given: dict[str, Any] = {}
    if "=" in first:
        rest = [first, *rest]
    else:
        given["interval"] = LEVELS.get(first) or _number("interval", first)
    for word in rest:
        name, equals, value = word.partition("=")
        if not equals:
            raise OptionError(f"{text!r} is no DeepCache setting.", _HINT)
        given[name] = value if name == "schedule" else _number(name, value)
    return DeepCacheOptions.parse(given) if given.get("interval") != 0 else OFF


def _number(name: str, text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"{text!r} is no DeepCache {name}.", _HINT) from None


def _number_text(value: object) -> str:
    return number_text(value) if isinstance(value, float) else str(value)
