"""The settings of a picture. Plain values: this module loads no torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from onediff_ext.core.deepcache_options import OFF, DeepCacheOptions
from onediff_ext.core.errors import OptionError
from onediff_ext.core.guidance_options import ALL_STEPS, GuidanceOptions
from onediff_ext.core.step_cache_options import NO_STEP_CACHE, StepCacheOptions
from onediff_ext.hosts.diffusers.schedulers import infotext_names


@dataclass(frozen=True)
class DrawSettings:
    """The settings of a picture, except its size, its seed and its input picture.

    Args:
        prompt, negative_prompt: As in the WebUI; cut at 75 tokens.
        steps: Sampling steps; image to image runs ``steps * strength`` of them.
        guidance: CFG scale; 1 or less draws without CFG.
        strength: Denoising strength of image to image, above 0 and up to 1.
        scheduler: A sampler's name, such as "Euler a" or "DPM++ 2M Karras".
        deepcache: How much of the UNet's work is reused between steps.
        step_cache: Which blocks of a transformer are skipped.
        guidance_steps: In which steps CFG is computed.

    Raises:
        OptionError: A value is out of range or unknown, or a prompt is no text.
    """

    prompt: str = ""
    negative_prompt: str = ""
    steps: int = 20
    guidance: float = 7.0
    strength: float = 0.6
    scheduler: str = "Euler a"
    deepcache: DeepCacheOptions = OFF
    step_cache: StepCacheOptions = NO_STEP_CACHE
    guidance_steps: GuidanceOptions = ALL_STEPS

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 1000:
            raise OptionError(f"{self.steps} steps cannot be drawn.", "Choose 1 to 1000.")
        if not 0 < self.strength <= 1:
            raise OptionError(
                f"A strength of {self.strength} cannot be used.", "Choose above 0 and up to 1."
            )
        if not 0 <= self.guidance <= 100:
            raise OptionError(f"A guidance of {self.guidance} cannot be used.", "Choose 0 to 100.")
        _check_text("prompt", self.prompt)
        _check_text("negative prompt", self.negative_prompt)
        infotext_names(self.scheduler)

    @property
    def is_uneven(self) -> bool:
        """Whether some steps do more work than others."""
        return self.deepcache.is_on or self.step_cache.is_on or self.guidance_steps.is_on

    def check_img2img_steps(self) -> None:
        """Raise OptionError when steps times strength is less than one step."""
        if int(self.steps * self.strength) < 1:
            enough = next(n for n in itertools.count(self.steps) if int(n * self.strength) >= 1)
            raise OptionError(
                f"{self.steps} steps at strength {self.strength} are less than one step.",
                f"Use at least {enough} steps, or a higher strength.",
            )


def _check_text(name: str, text: str) -> None:
    """Refuse what Python makes of bytes that are no text; tokenizers take none of it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise OptionError(
            f"The {name} is no text: its character {exc.start + 1} is no UTF-8.",
            "Write it again, in a terminal or file with UTF-8.",
        ) from exc
