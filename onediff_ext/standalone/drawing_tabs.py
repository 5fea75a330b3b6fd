"""Drawing for the tabs "Text to image" and "Image to image"."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onediff_ext.core.errors import OptionError
from onediff_ext.core.shapes import nearest_side_px
from onediff_ext.core.words import counted
from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
from onediff_ext.hosts.diffusers.drawing.image_generator import Drawn, ImageGenerator
from onediff_ext.hosts.diffusers.jobs.compose_infotext import compose_infotext, lora_field
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.infotext_entries import infotext_entries
from onediff_ext.pictures.canvas_images import from_canvas, to_canvas
from onediff_ext.pictures.canvas_sizes import fit_size
from onediff_ext.pictures.new_files import write_new_png
from onediff_ext.pictures.reading import read_picture
from onediff_ext.pictures.size_rules import parse_size_rule
from onediff_ext.standalone.app import StandaloneApp

MAX_SEED = 2**32 - 1
OnStep = Callable[[int, int], None]  # step, of how many


@dataclass(frozen=True)
class Result:
    """The images of one press of the button.

    Args:
        paths: PNG files with infotext.
        said: Count, time and seed, and the settings that were ignored; a sentence each.
    """

    paths: list[Path]
    said: list[str]


def chosen_seed(seed: float | None) -> int:
    """Return the seed to draw with: a random one for -1 or an empty box.

    Raises:
        OptionError: It is too large.
    """
    if seed is None or seed < 0:
        return random.randint(0, MAX_SEED)
    if seed > MAX_SEED:
        raise OptionError(f"The seed {seed:.0f} is too large.", f"Use 0 to {MAX_SEED}, or -1.")
    return int(seed)


def from_text(
    standalone_app: StandaloneApp,
    choices: Choices,
    settings: DrawSettings,
    width_px: int,
    height_px: int,
    batch: int,
    seed: int,
    output_dir: Path,
    on_step: OnStep,
) -> Result:
    """Draw a batch from the prompt; seeds count up.

    Raises:
        OneDiffError: It cannot be drawn, or the user cancelled.
    """
    width_px, height_px = nearest_side_px(width_px), nearest_side_px(height_px)
    seeds = list(range(seed, seed + batch))

    def job(image_generator: ImageGenerator) -> Drawn:
        return image_generator.txt2img(settings, width_px, height_px, seeds)

    drawn = standalone_app.draw(
        choices, width_px, height_px, batch, job, lambda step: on_step(step, settings.steps)
    )
    return _keep(standalone_app, choices, settings, drawn, seeds, output_dir, {})


def from_picture(
    standalone_app: StandaloneApp,
    choices: Choices,
    settings: DrawSettings,
    picture: Path | None,
    size_rule: str,
    batch: int,
    seed: int,
    output_dir: Path,
    on_step: OnStep,
) -> Result:
    """Draw a batch from one image, at the size of the rule.

    Raises:
        OneDiffError: The image is missing, it cannot be drawn, or the user cancelled.
    """
    if picture is None:
        raise OptionError("There is no picture to start from.", "Drop one into the box above.")
    settings.check_img2img_steps()
    image = read_picture(picture).image
    fit = fit_size(parse_size_rule(size_rule), image.width, image.height)
    canvas = to_canvas(image, fit)
    seeds = list(range(seed, seed + batch))

    def job(image_generator: ImageGenerator) -> Drawn:
        return image_generator.img2img(settings, [canvas] * batch, seeds)

    drawn = standalone_app.draw(
        choices,
        fit.canvas_width_px,
        fit.canvas_height_px,
        batch,
        job,
        lambda step: on_step(step, int(settings.steps * settings.strength)),
    )
    drawn = replace(
        drawn,
        images=[None if image is None else from_canvas(image, fit) for image in drawn.images],
    )
    extra: dict[str, object] = {"Denoising strength": settings.strength}
    return _keep(standalone_app, choices, settings, drawn, seeds, output_dir, extra)


def _keep(
    standalone_app: StandaloneApp,
    choices: Choices,
    settings: DrawSettings,
    drawn: Drawn,
    seeds: Sequence[int],
    output_dir: Path,
    extra: dict[str, object],
) -> Result:
    paths = []
    image_generator = standalone_app.loaded()
    for index, (image, seed) in enumerate(zip(drawn.images, seeds, strict=True)):
        if image is None:
            raise drawn.error(index)
        used = infotext_entries(choices) if standalone_app.session is not None else {}
        text = compose_infotext(
            image_generator,
            settings,
            seed,
            image.size,
            {**extra, **lora_field(standalone_app.identity), **used},
        )
        path = output_dir / f"{seed:010d}-{image.width}x{image.height}.png"
        paths.append(write_new_png(path, image, infotext=text, digest=""))
    count = counted(len(paths), "picture")
    took, step = f"{drawn.seconds:.1f}", f"{drawn.seconds_per_step:.3f}"
    said = f"{count} in {took} s, {step} s a step. Seed {seeds[0]}."
    notes = [*image_generator.ignored_text(settings), *map(str, drawn.notes)]
    return Result(paths, [said, *notes])
