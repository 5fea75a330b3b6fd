"""Which step cache of diffusers a transformer model is drawn with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onediff_ext.core.errors import OptionError
from onediff_ext.core.words import number_text

STEP_CACHES = {"first-block": 0.05, "mag-cache": 0.06, "taylorseer-lite": 5.0}
"""Name → diffusers' own default: thresholds, and for TaylorSeer the steps from one whole forward to
the next."""


@dataclass(frozen=True)
class StepCacheOptions:
    """A step cache and its number.

    Args:
        method: One of `STEP_CACHES`, or "off".
        amount: The cache's threshold above zero; of "taylorseer-lite" an interval in steps, from 2.

    Raises:
        OptionError: The cache is unknown or the number cannot be used.
    """

    method: str = "off"
    amount: float = 0.0

    def __post_init__(self) -> None:
        if self.method == "off":
            return
        if not isinstance(self.method, str) or self.method not in STEP_CACHES:
            raise OptionError(
                f"There is no step cache {self.method!r}.",
                f"Use off, {', '.join(STEP_CACHES)}, with a number such as first-block:0.08.",
            )
        if not isinstance(self.amount, int | float):
            raise OptionError(
                f"{self.amount!r} is no number for a step cache.",
                "Write for example first-block:0.08.",
            )
        is_interval = self.method == "taylorseer-lite"
        if is_interval and not (2 <= self.amount <= 100 and self.amount == int(self.amount)):
            raise OptionError(
                f"taylorseer-lite cannot run with an interval of {self.amount:g} steps.",
                "Write a whole number from 2, such as taylorseer-lite:5.",
            )
        if not is_interval and not (math.isfinite(self.amount) and 0 < self.amount <= 10):
            raise OptionError(
                f"{self.method} cannot run with a threshold of {self.amount:g}.",
                f"Write a number above 0 and up to 10, such as {self.method}:0.08.",
            )

    @classmethod
    def parse(cls, text: object) -> StepCacheOptions:
        """Read ``METHOD`` or ``METHOD:NUMBER``, or these options.

        Raises:
            OptionError: It is not one.
        """
        if isinstance(text, StepCacheOptions):
            return text
        method, colon, number = str(text).strip().lower().partition(":")
        try:
            amount = float(number) if colon else STEP_CACHES.get(method, 0.0)
        except ValueError:
            raise OptionError(
                f"{number!r} is no number for a step cache.", "Write for example first-block:0.08."
            ) from None
        return cls(method, amount if method != "off" else 0.0)

    @property
    def is_on(self) -> bool:
        """Whether steps are skipped at all."""
        return self.method != "off"

    def __str__(self) -> str:
        return f"{self.method}:{number_text(self.amount)}" if self.is_on else "off"


NO_STEP_CACHE = StepCacheOptions()
"""Off."""
