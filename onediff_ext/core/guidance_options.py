"""In which steps of a picture classifier-free guidance is computed.

In the other steps the denoiser runs for the prompt alone, which is half of the work.

Sources: Kynkäänniemi et al. 2024, "Applying Guidance in a Limited Interval Improves Sample and
Distribution Quality in Diffusion Models", arXiv:2404.07724; Castillo et al. 2023, "Adaptive
Guidance: Training-free Acceleration of Conditional Diffusion Models", arXiv:2312.12487.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from onediff_ext.core.errors import OptionError
from onediff_ext.core.words import number_text

DEFAULT_SIMILARITY = 0.991
"""The threshold of the paper on adaptive guidance."""

_HINT = "Use off, interval:0-0.6 (shares of a picture's steps) or adaptive:0.991."
_NUMBER = r"(\d*\.?\d+(?:e[+-]?\d+)?)"
_ROUNDING = 1e-9  # 0.7 * 10 is above 7


@dataclass(frozen=True)
class GuidanceOptions:
    """The steps with guidance.

    Args:
        method: "off" for guidance in all steps; "interval"; or "adaptive": until the predictions
            for prompt and negative prompt are alike.
        start, end: Of "interval": shares of a picture's steps, 0 to 1, between which guidance is
            computed.
        similarity: Of "adaptive": the cosine similarity of both predictions at which guidance ends.

    Raises:
        OptionError: A value cannot be used.
    """

    method: str = "off"
    start: float = 0.0
    end: float = 1.0
    similarity: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in ("off", "interval", "adaptive"):
            raise OptionError(f"There are no guidance steps {self.method!r}.", _HINT)
        if not 0 <= self.start < self.end <= 1:
            raise OptionError(
                f"Guidance cannot be computed from {self.start:g} to {self.end:g} of the steps.",
                "Choose two numbers from 0 to 1, the smaller first, such as interval:0-0.6.",
            )
        if not 0 < self.similarity <= 1:
            raise OptionError(
                f"Guidance cannot end at a similarity of {self.similarity:g}.",
                "Choose a number above 0 and up to 1, such as adaptive:0.991.",
            )

    @property
    def is_on(self) -> bool:
        """Whether any step may be drawn without guidance."""
        is_part = self.method == "interval" and (self.start, self.end) != (0, 1)
        return is_part or self.method == "adaptive"

    def has_guidance(self, step: int, steps: int) -> bool:
        """Return whether a step is one of the interval; always so for the other methods.

        Args:
            step: Its number, from 0.
            steps: All steps that the picture has.
        """
        first = math.ceil(self.start * steps - _ROUNDING)
        return first <= step < math.ceil(self.end * steps - _ROUNDING)

    def __str__(self) -> str:
        """Return text that `parse` reads back, such as ``"interval:0-0.6"``."""
        if self.method == "interval":
            return f"interval:{number_text(self.start)}-{number_text(self.end)}"
        if self.method == "adaptive":
            return f"adaptive:{number_text(self.similarity)}"
        return "off"

    @classmethod
    def parse(cls, value: object) -> GuidanceOptions:
        """Read options in any form that a front end passes.

        Args:
            value: This class; None, False or "" for off; a text such as ``"interval:0-0.6"``,
                ``"adaptive:0.991"`` or ``"adaptive"``.

        Raises:
            OptionError: It cannot be read or used.
        """
        if isinstance(value, cls):
            return value
        if value is None or value is False:
            return ALL_STEPS
        if not isinstance(value, str):
            raise OptionError(f"{value!r} says nothing of guidance steps.", _HINT)
        text = value.strip().lower()
        if text in ("", "off"):
            return ALL_STEPS
        if text == "adaptive":
            return cls(text, similarity=DEFAULT_SIMILARITY)
        if found := re.fullmatch(f"interval:{_NUMBER}-{_NUMBER}", text):
            return cls("interval", float(found[1]), float(found[2]))
        if found := re.fullmatch(f"adaptive:{_NUMBER}", text):
            return cls("adaptive", similarity=float(found[1]))
        raise OptionError(f"There are no guidance steps {value!r}.", _HINT)


ALL_STEPS = GuidanceOptions()
"""Off."""
