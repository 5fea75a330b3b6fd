"""In which steps of a picture classifier-free guidance is computed.

In the other steps the denoiser runs for the prompt alone, which is half of the work. With a gate,
cross-attention is left out there too.

Sources: Kynkäänniemi et al. 2024, "Applying Guidance in a Limited Interval Improves Sample and
Distribution Quality in Diffusion Models", arXiv:2404.07724; Castillo et al. 2023, "Adaptive
Guidance: Training-free Acceleration of Conditional Diffusion Models", arXiv:2312.12487; Zhang et
al. 2024, "Cross-Attention Makes Inference Cumbersome in Text-to-Image Diffusion Models",
arXiv:2404.02747.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from onediff_ext.core.errors import OptionError
from onediff_ext.core.words import number_text

DEFAULT_SIMILARITY = 0.991
"""The threshold of the paper on adaptive guidance."""

_HINT = "Use off, interval:0-0.6 (shares of a picture's steps), adaptive:0.991 or gate:0.4."
_NUMBER = r"(\d*\.?\d+(?:e[+-]?\d+)?)"
_ROUNDING = 1e-9  # 0.7 * 10 is above 7


@dataclass(frozen=True)
class GuidanceOptions:
    """The steps with guidance.

    Args:
        method: "off" for guidance in all steps; "interval"; "adaptive": until the predictions for
            prompt and negative prompt are alike; or "gate": in the first steps, whose last one
            keeps the outputs of cross-attention for the others.
        start, end: Of "interval" and "gate": shares of a picture's steps, 0 to 1, between which
            guidance is computed. A gate's start is 0.
        similarity: Of "adaptive": the cosine similarity of both predictions at which guidance ends.

    Raises:
        OptionError: A value cannot be used.
    """

    method: str = "off"
    start: float = 0.0
    end: float = 1.0
    similarity: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in ("off", "interval", "adaptive", "gate"):
            raise OptionError(f"There are no guidance steps {self.method!r}.", _HINT)
        if self.method == "gate" and not (self.start == 0 < self.end <= 1):
            raise OptionError(
                f"A gate at {self.end:g} of the steps cannot be used.",
                "Choose a number above 0 and up to 1, such as gate:0.4.",
            )
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
        is_part = self.method in ("interval", "gate") and (self.start, self.end) != (0, 1)
        return is_part or self.method == "adaptive"

    def has_guidance(self, step: int, steps: int) -> bool:
        """Return whether a step is one of the interval, or before the gate; else True.

        Args:
            step: Its number, from 0.
            steps: All steps that the picture has.
        """
        first = math.ceil(self.start * steps - _ROUNDING)
        return first <= step < math.ceil(self.end * steps - _ROUNDING)

    def keeps_attention(self, step: int, steps: int) -> bool:
        """Return whether a step is the gate's: the last one with guidance.

        Args:
            step, steps: As for `has_guidance`.
        """
        is_last = self.has_guidance(step, steps) and not self.has_guidance(step + 1, steps)
        return self.method == "gate" and is_last

    def __str__(self) -> str:
        """Return text that `parse` reads back, such as ``"interval:0-0.6"``."""
        if self.method == "interval":
            return f"interval:{number_text(self.start)}-{number_text(self.end)}"
        if self.method == "adaptive":
            return f"adaptive:{number_text(self.similarity)}"
        if self.method == "gate":
            return f"gate:{number_text(self.end)}"
        return "off"

    @classmethod
    def parse(cls, value: object) -> GuidanceOptions:
        """Read options in any form that a front end passes.

        Args:
            value: This class; None, False or "" for off; a text such as ``"interval:0-0.6"``,
                ``"adaptive:0.991"``, ``"adaptive"`` or ``"gate:0.4"``.

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
        if found := re.fullmatch(f"gate:{_NUMBER}", text):
            return cls("gate", end=float(found[1]))
        raise OptionError(f"There are no guidance steps {value!r}.", _HINT)


ALL_STEPS = GuidanceOptions()
"""Off."""
