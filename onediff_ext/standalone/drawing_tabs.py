"""What the page's three tabs do: from text, from one picture, from a folder."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onediff_ext.core.errors import OptionError
from onediff_ext.core.shapes import nearest_side_px
from onediff_ext.core.words import counted
from onediff_ext.hosts.diffusers.drawing.image_generator import Drawn, DrawSettings, ImageGenerator
from onediff_ext.hosts.diffusers.jobs.img2img_job import infotext, lora_field
from onediff_ext.panel.choices import Choices
from onediff_ext.pictures.fitting import from_canvas, to_canvas
from onediff_ext.pictures.reading import read_picture
from onediff_ext.pictures.sizing import fit_size, parse_size_rule
from onediff_ext.pictures.writing import write_png
from onediff_ext.standalone.app import StandaloneApp

MAX_SEED = 2**32 - 1
OnStep = Callable[[int, int], None]  # step, of how many


@dataclass(frozen=True)
class Result:
    """Pictures of one press of the button.

    Args:
        paths: Written pictures with their infotext.
        said: What was done, how long it took, and what of the settings was left out.
    """

    paths: list[Path]
    said: str


def chosen_seed(seed: float | None) -> int:
    """The seed to draw with: a random one for -1 or nothing.

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
        OneDiffError: It cannot be drawn, or was cancelled.
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
    """Draw a batch from one picture, at the size that the rule says.

    Raises:
        OneDiffError: There is no picture, it cannot be drawn, or was cancelled.
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
        used = choices.infotext() if standalone_app.session is not None else {}
        text = infotext(
            image_generator,
            settings,
            seed,
            image,
            {**extra, **lora_field(standalone_app.identity), **used},
        )
        path = _free(output_dir / f"{seed:010d}-{image.width}x{image.height}.png")
        write_png(path, image, infotext=text, digest="")
        paths.append(path)
    count = counted(len(paths), "picture")
    said = (
        f"{count} in {drawn.seconds:.1f} s, {drawn.seconds_per_step:.3f} s a step. Seed {seeds[0]}."
    )
    said = " ".join(
        [said, *image_generator.ignored_text(settings), *(f"{n}." for n in drawn.notes)]
    )
    return Result(paths, said)


def _free(path: Path) -> Path:
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free
