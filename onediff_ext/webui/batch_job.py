"""The main job inside a WebUI: folders of pictures of many sizes through the host's img2img."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from onediff_ext.core.errors import OptionError, PictureError
from onediff_ext.core.words import counted
from onediff_ext.pictures.background_io import Writing, read_ahead
from onediff_ext.pictures.fitting import from_canvas, to_target
from onediff_ext.pictures.grouping import (
    LoadedPicture,
    PlannedPicture,
    group_by_canvas,
    read_batches,
)
from onediff_ext.pictures.naming import NameTemplate
from onediff_ext.pictures.planning import PlannedResult, check_found, plan_results
from onediff_ext.pictures.sizing import SizeRule
from onediff_ext.pictures.skipped import Report
from onediff_ext.pictures.writing import write_png

_Drawn: TypeAlias = tuple[LoadedPicture, Any, str]
"""An input, the picture that came of it, and that one's infotext."""


@dataclass(frozen=True)
class BatchChoices:
    """What the user chose for a run.

    Args:
        inputs: Folders or files.
        output_dir: Where results go.
        size_rule: How large each result becomes.
        batch_size: Pictures of one size at the same time, at most.
        name_template: How results are named.
        recursive: Look into subfolders too.
        captions: ``cat.txt`` beside ``cat.jpg`` is that picture's prompt.
        vary_seed: Add the picture's number to the seed.
        keep_alpha: Give a result the transparency of its input.
    """

    inputs: Sequence[Path]
    output_dir: Path
    size_rule: SizeRule
    batch_size: int = 4
    name_template: NameTemplate = field(default_factory=NameTemplate)
    recursive: bool = False
    captions: bool = False
    vary_seed: bool = False
    keep_alpha: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= 64:
            raise OptionError("Pictures at once must be 1 to 64.", "Use 1 if memory is short.")


@dataclass
class BatchResult:
    """What a run did.

    Args:
        written: Results of this run.
        already_done: Results of an earlier run of the same job.
        report: What was left out, and why.
        first: The host's ``Processed`` of the first batch.
        shown, infotexts: What goes into the host's gallery.
        was_stopped: The user interrupted; the same job goes on where it stopped.
        skipped: Pictures of batches that the user skipped; the same job draws them.
    """

    written: list[Path] = field(default_factory=list)
    already_done: list[Path] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    first: Any = None
    shown: list[Any] = field(default_factory=list)
    infotexts: list[str] = field(default_factory=list)
    was_stopped: bool = False
    skipped: int = 0

    def summary(self) -> str:
        """One line for people, and one for each picture that was left out."""
        parts = [f"{counted(len(self.written), 'picture')} drawn"]
        if self.already_done:
            parts.append(f"{len(self.already_done)} were done already")
        if self.skipped:
            parts.append(f"{self.skipped} skipped")
        if self.was_stopped:
            parts.append("stopped; the same job goes on here")
        failures = self.report.failures
        if failures:
            parts.append(f"{len(failures)} left out")
        return "\n".join([", ".join(parts) + ".", *map(str, failures)])


class BatchJob:
    """One run.

    Args:
        p: The host's img2img processing object, its seed already fixed.
        choices: What the user chose.
        process: The host's ``process_images``.
        state: The host's ``shared.state``: progress, interrupt, skip.
        identity: What else decides a picture, such as checkpoint and VAE.
        shown_limit: Pictures handed to the host's gallery, at most.
    """

    def __init__(
        self,
        p: Any,
        choices: BatchChoices,
        *,
        process: Callable[[Any], Any],
        state: Any,
        identity: dict[str, object],
        shown_limit: int = 32,
    ) -> None:
        self._p, self._choices, self._process, self._state = p, choices, process, state
        self._identity, self._shown_limit = identity, shown_limit
        self._seed = int(p.seed)
        self._targets: dict[int, PlannedResult] = {}
        self.result = BatchResult()

    def run(self) -> BatchResult:
        """Draw what is left; pictures are read and written in threads beside that.

        Raises:
            OneDiffError: A setting cannot be used, or a result cannot be written; what was
                written stays, and the same job goes on there.
        """
        groups = group_by_canvas(self._plan())
        size = self._choices.batch_size
        total = sum(-(-len(group.pictures) // size) for group in groups)
        self._state.job_count = max(1, total)
        batches = (
            batch
            for group in groups
            for batch in read_batches(group, size, report=self.result.report)
        )
        with Writing() as writing:
            for number, batch in enumerate(read_ahead(batches), 1):
                if self._state.interrupted or self._state.stopping_generation:
                    self.result.was_stopped = True
                    return self.result
                self._state.skipped = False
                fit = batch[0].planned.fit
                self._state.job = (
                    f"{number} of {total}: {counted(len(batch), 'picture')} of "
                    f"{fit.canvas_width_px}x{fit.canvas_height_px}"
                )
                drawn = self._draw(batch)
                if drawn:
                    writing.put(partial(self._write_all, drawn))
        self.result.was_stopped = bool(self._state.interrupted)
        return self.result

    def _plan(self) -> list[PlannedPicture]:
        choices = self._choices
        plan = plan_results(
            choices.inputs,
            choices.output_dir,
            choices.size_rule,
            choices.name_template,
            seed_of=self._seed_of,
            settings_of=self._settings_of,
            report=self.result.report,
            recursive=choices.recursive,
            captions=choices.captions,
        )
        check_found(plan, choices.inputs, self.result.report)
        self.result.already_done = plan.already_done
        self._targets = {result.planned.index: result for result in plan.todo}
        plan.make_folders()
        return [result.planned for result in plan.todo]

    def _draw(self, batch: tuple[LoadedPicture, ...]) -> list[_Drawn]:
        job = self._host_job(batch)
        processed = self._process(job)
        if self._state.skipped and not self._state.interrupted:
            self.result.skipped += len(batch)
        if self._state.interrupted or self._state.skipped or processed is None:
            return []  # half-drawn pictures are not results
        if self.result.first is None:
            self.result.first = processed
        first = getattr(processed, "index_of_first_image", 0)
        images = processed.images[first : first + len(batch)]
        infotexts = processed.infotexts[first : first + len(batch)]
        return list(zip(batch, images, infotexts, strict=False))

    def _host_job(self, batch: tuple[LoadedPicture, ...]) -> Any:
        fit = batch[0].planned.fit
        job = copy.copy(self._p)
        job.init_images = [loaded.canvas for loaded in batch]
        job.width, job.height = fit.canvas_width_px, fit.canvas_height_px
        job.batch_size, job.n_iter = len(batch), 1
        # One seed and one prompt for each: grouping never decides what a picture looks like.
        job.seed = [self._seed_of(loaded.planned) for loaded in batch]
        job.subseed = [-1 if self._p.subseed is None else self._p.subseed] * len(batch)
        job.prompt = [self._prompt_of(loaded.planned) for loaded in batch]
        job.image_mask = None
        job.resize_mode = 0
        job.do_not_save_samples = job.do_not_save_grid = True
        job.override_settings = dict(self._p.override_settings)
        job.extra_generation_params = dict(self._p.extra_generation_params)
        return job

    def _write_all(self, drawn: list[_Drawn]) -> None:
        for loaded, image, infotext in drawn:
            self._write(loaded, image, infotext)

    def _write(self, loaded: LoadedPicture, image: Any, infotext: str) -> None:
        planned = loaded.planned
        target = self._targets[planned.index]
        if image.size != (planned.fit.canvas_width_px, planned.fit.canvas_height_px):
            reason = "another script has changed the result's size"
            self.result.report.skip(planned.facts.path, PictureError(f"Not written: {reason}."))
            return
        result = from_canvas(image.convert("RGB"), planned.fit)
        alpha = loaded.picture.alpha if self._choices.keep_alpha else None
        write_png(
            target.path,
            result,
            infotext=infotext,
            digest=target.digest,
            alpha=None if alpha is None else to_target(alpha, planned.fit),
        )
        self.result.written.append(target.path)
        if len(self.result.shown) < self._shown_limit:
            self.result.shown.append(result)
            self.result.infotexts.append(infotext)

    def _seed_of(self, planned: PlannedPicture) -> int:
        return self._seed + (planned.index if self._choices.vary_seed else 0)

    def _prompt_of(self, planned: PlannedPicture) -> str:
        return self._p.prompt if planned.caption is None else planned.caption

    def _settings_of(self, planned: PlannedPicture) -> dict[str, object]:
        p = self._p
        return {
            **self._identity,
            "prompt": self._prompt_of(planned),
            "negative_prompt": p.negative_prompt,
            "steps": p.steps,
            "sampler": p.sampler_name,
            "scheduler": getattr(p, "scheduler", None),
            "cfg_scale": p.cfg_scale,
            "strength": p.denoising_strength,
            "styles": list(p.styles or ()),
            "override_settings": {k: str(v) for k, v in p.override_settings.items()},
            "seed": self._seed_of(planned),
            "subseed_strength": p.subseed_strength,
            "size_rule": str(self._choices.size_rule),
            "keep_alpha": self._choices.keep_alpha,
        }
